"""What a server may send in answer to a client over httpx: no more than the caller allows, plain, and in time."""

import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from shoal.cli.pool.meeting import meeting_at
from shoal.protocol.calling import LEAST_BPS, BodyError, NodeError, OversizeError, read_body
from shoal.protocol.history import PoolWatch, UnreachableError
from shoal.protocol.identity import Identity
from shoal.protocol.invite import make_invite, run_id
from shoal.protocol.node import Node

URL = "http://h:1"
SENT_BYTES = 64 << 20  # where nobody stops reading


class Flood(httpx.SyncByteStream):
    """A body far over all limits; `sent` counts its bytes."""

    def __init__(self) -> None:
        self.sent = 0

    def __iter__(self) -> Iterator[bytes]:
        while self.sent < SENT_BYTES:
            self.sent += 1 << 20
            yield bytes(1 << 20)


def watch(transport: httpx.MockTransport) -> None:
    with pytest.raises(UnreachableError):
        PoolWatch(URL, httpx.Client(transport=transport)).look()


def meeting(transport: httpx.MockTransport) -> None:
    assert meeting_at(URL, httpx.Client(transport=transport)) is None


READERS = [watch, meeting]


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_reads_an_answer_without_end(reader: Callable[[httpx.MockTransport], None]) -> None:
    flood = Flood()
    reader(httpx.MockTransport(lambda request: httpx.Response(200, stream=flood)))
    assert flood.sent <= 20 << 20


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_decompresses(reader: Callable[[httpx.MockTransport], None], monkeypatch: pytest.MonkeyPatch) -> None:
    accepted: list[str] = []

    def bomb(request: httpx.Request) -> httpx.Response:
        accepted.append(request.headers["accept-encoding"])
        body = gzip.compress(b'{"rounds": 1}' + bytes(1 << 20))
        return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=Packed(body))

    reader(httpx.MockTransport(bomb))
    assert set(accepted) == {"identity"} and not Packed.read


class Packed(httpx.SyncByteStream):
    """A compressed body; `read` says whether anybody asked for it."""

    read = False

    def __init__(self, body: bytes) -> None:
        self.body = body
        Packed.read = False

    def __iter__(self) -> Iterator[bytes]:
        Packed.read = True
        yield self.body


def response(pieces: Iterator[bytes]) -> httpx.Response:
    return httpx.Response(200, content=pieces, request=httpx.Request("GET", URL))


def test_a_body_that_trickles_ends_when_it_is_slower_than_the_least() -> None:
    clock = count(0.0, 1.0)
    with pytest.raises(httpx.ReadTimeout, match="bytes in 31 s"):
        read_body(response(b"x" for _ in range(10**6)), 10**9, lambda: next(clock))


def test_a_slow_body_that_moves_is_read_to_its_end() -> None:
    clock, piece = count(0.0, 1.0), bytes(LEAST_BPS)
    assert len(read_body(response(piece for _ in range(100)), 10**9, lambda: next(clock))) == 100 * len(piece)


def test_the_limit_itself_is_allowed() -> None:
    assert read_body(response(iter([b"abc"])), 3) == b"abc"
    with pytest.raises(OversizeError, match="more than 2 bytes"):
        read_body(response(iter([b"abc"])), 2)
    assert issubclass(OversizeError, BodyError)


def test_a_coordinator_whose_headers_trickle_counts_as_silent(tmp_path: Path) -> None:
    stop = threading.Event()

    def trickle(connection: socket.socket) -> None:
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            while not stop.wait(0.05):
                connection.sendall(b"x: y\r\n")
        except OSError:
            return

    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while not stop.is_set():
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=trickle, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        identity = Identity.generate()
        url, run = f"http://127.0.0.1:{server.getsockname()[1]}", run_id("r", identity.public)
        invite = make_invite(identity, url=url, run=run, role="worker", name="w", expires_s=int(time.time()) + 60)
        try:
            with pytest.raises(NodeError, match="did not answer GET /v1/run"):
                Node.of(invite, Identity.generate(), patience_s=0.5).descriptor()
        finally:
            stop.set()
