"""What strangers and sites may ask of a meeting over its socket. The frame itself: `tests/protocol/test_server.py`."""

import json
import socket
from pathlib import Path

import httpx
import pytest

from shoal.diloco import serve
from tests.diloco.test_meeting import terms
from tests.diloco.test_serve import Trainee, served


def test_a_site_that_sends_all_before_it_reads_gets_the_reason(tmp_path: Path) -> None:
    """Without lingering, what is left of a refused body would reset the connection under the answer."""
    with served(tmp_path / "meet", terms()) as host, socket.create_connection(("127.0.0.1", host.port)) as stranger:
        stranger.settimeout(30)
        stranger.sendall(b"PUT /v1/rounds/0/%s HTTP/1.1\r\nHost: x\r\n" % (b"0" * 64))
        stranger.sendall(b"Content-Length: %d\r\n\r\n" % (16 << 20))
        for _ in range(16):
            stranger.sendall(bytes(1 << 20))
        assert stranger.recv(4096).startswith(b"HTTP/1.1 401")


def test_a_strangers_connection_ends_with_its_answer_and_a_sites_stays(tmp_path: Path) -> None:
    with served(tmp_path / "meet", terms()) as host:
        site = Trainee(host, "site-a", tmp_path)
        site.join()
        site.rounds(1)
        pool = site.remote.node.client._transport._pool  # type: ignore[attr-defined]
        assert any(connection.is_idle() for connection in pool.connections)
        found = httpx.get(f"http://127.0.0.1:{host.port}/v1/status").json()
        assert found["sites"]["site-a"]["accepted"] == 0 and found["round"] == 1
        with socket.create_connection(("127.0.0.1", host.port), timeout=20) as stranger:
            stranger.sendall(b"POST /v1/state HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            answer = b""
            while piece := stranger.recv(4096):  # until the meeting closes it
                answer += piece
        assert answer.startswith(b"HTTP/1.1 401") and json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def test_an_address_has_only_so_many_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "OF_ADDRESS", 3)
    with served(tmp_path / "meet", terms()) as host:
        idle = [socket.create_connection(("127.0.0.1", host.port), timeout=20) for _ in range(3)]
        with socket.create_connection(("127.0.0.1", host.port), timeout=20) as fourth:
            assert fourth.recv(1) == b""
        for each in idle:
            each.close()
