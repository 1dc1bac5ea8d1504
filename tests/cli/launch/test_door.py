"""The dashboard of a running run starts when somebody looks, and ends with the run."""

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shoal.cli.launch.door import Door, DoorError
from tests.cli.audit.recorded import record_run

PATIENCE_S = 120.0


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    door = Door(record_run(tmp_path))
    yield door
    if door._listener.fileno() >= 0:
        door.close()


def test_the_server_starts_at_the_first_look_and_ends_with_the_door(door: Door) -> None:
    assert door._server is None  # nobody has looked
    found = httpx.get(f"{door.url}api/open", timeout=PATIENCE_S).json()
    assert found["overview"]["trained"] == 3
    door.close()
    assert door._server is not None and door._server.poll() is not None


@pytest.mark.slow
def test_a_server_that_died_is_started_again(door: Door) -> None:
    assert httpx.get(f"{door.url}api/open", timeout=PATIENCE_S).status_code == 200
    first = door._server
    assert first is not None
    first.kill()
    first.wait(PATIENCE_S)
    assert httpx.get(f"{door.url}api/open", timeout=PATIENCE_S).status_code == 200
    assert door._server is not first


def test_a_door_that_nobody_opened_closes_at_once(tmp_path: Path) -> None:
    door = Door(tmp_path)
    door.close()
    assert door._server is None


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(DoorError, match="choose another"):
        Door(Path(), taken.getsockname()[1])
