"""What strangers and sites may ask of a meeting: each limit is reached, and nobody else notices."""

import asyncio
import json
import socket
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from shoal.diloco import gate
from shoal.diloco.gate import DISCARD_RATE, BodyError, BusyError, Gate, SlowError, read_body
from shoal.shardcast.serve.guard import BURST_S
from tests.diloco.test_meeting import terms
from tests.diloco.test_serve import Trainee, served


def asked() -> web.Request:
    return make_mocked_request("GET", "/v1/status")


class Body:
    """What arrives of a request's body, a piece at a time. Without an end, the sender falls silent."""

    def __init__(self, *pieces: bytes, ends: bool = True) -> None:
        self.pieces, self.ends = list(pieces), ends

    async def readany(self) -> bytes:
        if not self.pieces and not self.ends:
            await asyncio.sleep(3600)
        return self.pieces.pop(0) if self.pieces else b""


def body_of(*pieces: bytes, ends: bool = True) -> web.Request:
    return make_mocked_request("PUT", "/", payload=Body(*pieces, ends=ends))


def test_a_site_over_its_rate_is_refused_and_another_is_not() -> None:
    now_s = 0.0
    door, request = Gate(lambda: now_s), asked()
    with pytest.raises(BusyError, match="more than 40 requests a second by site-a"):
        for _ in range(500):
            with door.site(request, "site-a"):
                pass
    with door.site(asked(), "site-b"):
        pass
    now_s = 1.0
    with door.site(asked(), "site-a"):
        pass


def test_a_site_has_only_so_many_requests_at_once() -> None:
    door = Gate(lambda: 0.0)
    open_ones = [door.site(asked(), "site-a") for _ in range(gate.AT_ONCE)]
    for each in open_ones:
        each.__enter__()
    with pytest.raises(BusyError, match="8 requests of site-a are under way"), door.site(asked(), "site-a"):
        pass
    open_ones[0].__exit__(None, None, None)
    with door.site(asked(), "site-a"):
        pass


def test_refusals_of_strangers_are_held_back_and_a_sites_answer_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[float] = []

    async def sleep(seconds: float) -> None:
        held.append(seconds)

    monkeypatch.setattr(gate.asyncio, "sleep", sleep)
    door = Gate(lambda: 0.0)

    async def ask() -> None:
        stranger, request = asked(), asked()
        for _ in range(300):
            await door.leave(stranger, web.Response(status=401))
        with door.site(request, "site-a"):
            await door.leave(request, web.Response(status=409))

    asyncio.run(ask())
    assert len(held) == 300 and held[0] == 0.0 and held[-1] == gate.LONGEST_HOLD_S


def test_a_body_is_read_up_to_its_limit_and_only_while_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "STRANGER_S", 0.01)

    async def read() -> None:
        assert await read_body(body_of(b"ab", b"cd"), 4) == b"abcd"
        with pytest.raises(BodyError, match="more than the 3 bytes"):
            await read_body(body_of(b"ab", b"cd"), 3)
        with pytest.raises(SlowError, match="did not arrive in time"):
            await read_body(body_of(b"ab", ends=False), 4)

    asyncio.run(read())


def test_refused_bodies_are_read_at_one_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    async def sleep(hold_s: float) -> None:
        nonlocal now_s
        now_s += hold_s

    # For this module alone: a meeting in another thread sleeps too.
    monkeypatch.setattr(gate, "asyncio", SimpleNamespace(sleep=sleep, timeout=asyncio.timeout))
    piece = bytes(1 << 20)
    refused = body_of(*[piece] * (3 * int(DISCARD_RATE * BURST_S) // len(piece)))
    asyncio.run(Gate(lambda: now_s).discard(refused))
    assert now_s == pytest.approx(2 * BURST_S, rel=0.02)


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
    monkeypatch.setattr(gate, "OF_ADDRESS", 3)
    with served(tmp_path / "meet", terms()) as host:
        idle = [socket.create_connection(("127.0.0.1", host.port), timeout=20) for _ in range(3)]
        with socket.create_connection(("127.0.0.1", host.port), timeout=20) as fourth:
            assert fourth.recv(1) == b""
        for each in idle:
            each.close()
