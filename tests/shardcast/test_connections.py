"""Who gets a connection when there are too many, and how many this process can have at all."""

import asyncio
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from shoal.shardcast import connections
from shoal.shardcast.connections import PATIENCE, ClientConnection, Listener, Patience


class Door:
    """A listener, and strangers who connect to it."""

    def __init__(self, total: int, patience: Patience = PATIENCE) -> None:
        self.listener = Listener("127.0.0.1", 0, patience, per_address=100, total=total)
        self.listener.listen()
        self.strangers: list[socket.socket] = []

    def connect(self) -> ClientConnection:
        """Raises ConnectionAbortedError if the listener refuses."""
        self.strangers.append(socket.create_connection(self.listener.getsockname(), timeout=10))
        connection, _ = self.listener.accept()
        assert isinstance(connection, ClientConnection)
        return connection

    def close(self) -> None:
        for one in [*self.strangers, *self.listener.open.values(), self.listener]:
            one.close()


@pytest.fixture
def door() -> Iterator[Door]:
    found = Door(total=3)
    yield found
    found.close()


def test_at_the_limit_the_oldest_that_asked_nothing_loses_its_place_to_the_next(door: Door) -> None:
    """Else a few thousand silent strangers keep every new node out."""
    member, oldest, other = (door.connect() for _ in range(3))
    door.listener.note_request(member.peer)
    with pytest.raises(ConnectionAbortedError):
        door.connect()
    with suppress(ConnectionResetError):
        assert door.strangers[1].recv(1) == b"", "it is cut"
    assert oldest in door.listener.open.values(), "and counts until it is closed"
    oldest.close()
    newest = door.connect()
    assert list(door.listener.open.values()) == [member, other, newest]


def test_at_the_limit_of_those_who_asked_the_new_one_is_refused(door: Door) -> None:
    for _ in range(3):
        door.listener.note_request(door.connect().peer)
    with pytest.raises(ConnectionAbortedError):
        door.connect()
    assert (door.listener.refused, door.listener.cut, len(door.listener.open)) == (1, 0, 3)


def test_a_closed_connection_leaves_its_place(door: Door) -> None:
    for _ in range(10):
        door.connect().close()
    assert not door.listener.open and door.listener.cut == 0


def test_whoever_could_not_be_read_is_not_cut_for_it() -> None:
    """A coordinator that was frozen, or is overloaded, must not drop the requests that wait for it."""
    patience = Patience(headers_s=0.5)

    async def freeze() -> tuple[bool, bool]:
        door = Door(total=3, patience=patience)
        watching = door.listener.watching(None)
        await anext(watching)
        try:
            connection = door.connect()
            await asyncio.sleep(0)
            time.sleep(2 * patience.headers_s)  # noqa: ASYNC251 - nothing is read meanwhile
            await asyncio.sleep(0.1)
            kept = connection in door.listener.open.values()
            async with asyncio.timeout(60):
                while connection in door.listener.open.values():
                    await asyncio.sleep(0.1)
            return kept, door.listener.cut == 1
        finally:
            await anext(watching, None)
            door.close()

    kept, cut_later = asyncio.run(freeze())
    assert kept and cut_later, "its own time counts all the same"


# --- open files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def soft_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_server_accepts_as_many_as_it_can_open_files_for_and_says_so(
    soft_limit: None, caplog: pytest.LogCaptureFixture
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    assert connections.affordable(4096) == 448
    assert "accepts 448 connections instead of 4096" in caplog.text and "ulimit -n" in caplog.text
    caplog.clear()
    assert connections.affordable(100) == 100
    assert connections.affordable(sys.maxsize) == 448 and not caplog.messages


def test_a_starting_role_takes_all_the_system_gives(soft_limit: None) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this system has no limit")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    assert connections.raise_limit() == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


SERVER = """
import asyncio, sys, resource
from pathlib import Path
from shoal.shardcast.server import app, serve

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

async def main():
    _, port = await serve(app(Path(sys.argv[1])))
    print(port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_more_idle_connections_than_files_bring_no_traceback_and_no_wait(tmp_path: Path) -> None:
    (tmp_path / "versions.json").write_text('{"versions":[]}')
    command = [sys.executable, "-c", SERVER, str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        idle = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(300)]

        async def ask() -> int:
            """Again and again, as any client does."""
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
                for _ in range(20):
                    with suppress(aiohttp.ClientError, TimeoutError):
                        async with session.get(f"http://127.0.0.1:{port}/healthz") as answer:
                            return json.loads(await answer.text())["connections"]
            raise AssertionError("no answer")

        assert 1 <= asyncio.run(ask()) <= (256 - connections.RESERVED) // 2
        for one in idle:
            one.close()
    finally:
        server.kill()
        _, errors = server.communicate()
    assert errors == ""
