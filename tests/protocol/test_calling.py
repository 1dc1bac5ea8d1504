"""Requests to a coordinator that is away, silent or busy, or whose answer is forged or too large."""

import gzip
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from shoal.protocol import calling
from shoal.protocol.calling import MIN_BPS, WAITING_SHARE, BodyError, NodeError, RefusedError, StoppedError, read_body
from shoal.protocol.history import PoolWatch, UnreachableError
from shoal.protocol.messages import Ok
from shoal.protocol.node import Node

from .support import OTHER, FakeCoordinator, NoPauses, answered, invite, join

URL = "http://h:1"

# --- requests --------------------------------------------------------------------------------------------------------


def test_requests_are_repeated_while_the_coordinator_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    coordinator, stop = FakeCoordinator(away=6), NoPauses()
    assert join(coordinator, tmp_path, stop=stop).name == "w-0"
    assert len({request.headers["signature"] for request in coordinator.requests}) == 7, (
        "a signature was used twice, so the coordinator would refuse it as a replay"
    )
    assert stop.pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0]), "pauses must double, up to 2 s"
    assert caplog.messages == ["waiting up to 5 s for the coordinator at http://c:1: ConnectError: refused"], (
        "there must be exactly one warning"
    )


def test_a_large_body_is_sent_completely_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """httpcore copies the rest of a piece each time it has sent a part, so 270 MB in one piece took 15 s on loopback."""
    monkeypatch.setattr(calling, "SEND_BYTES", 1000)
    coordinator = FakeCoordinator()
    node, data = join(coordinator, tmp_path), bytes(range(250)) * 10
    coordinator.answers["/v1/x"] = "{}"
    node.put("/v1/x", data, Ok)
    assert isinstance(stream := coordinator.requests[-1].stream, httpx.SyncByteStream)
    assert [len(piece) for piece in stream] == [1000, 1000, 500] and b"".join(stream) == data
    assert coordinator.requests[-1].headers["content-length"] == "2500"


def test_the_error_at_the_deadline_names_the_coordinator(tmp_path: Path) -> None:
    started_s = time.monotonic()
    with pytest.raises(
        NodeError, match="http://c:1 did not answer POST /v1/register for 0 s .ConnectError: refused."
    ) as caught:
        join(FakeCoordinator(away=1_000), tmp_path, patience_s=0.4)
    assert time.monotonic() - started_s < 5
    assert not isinstance(caught.value, RefusedError) and "is it running" in str(caught.value)


def test_a_node_that_is_told_to_stop_makes_no_further_attempt(tmp_path: Path) -> None:
    coordinator, stop = FakeCoordinator(away=1_000), NoPauses(most=2)
    with pytest.raises(StoppedError, match="http://c:1 did not answer POST /v1/register"):
        join(coordinator, tmp_path, patience_s=1e9, stop=stop)
    assert len(coordinator.requests) == 3


def test_a_stop_does_not_wait_for_a_silent_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()  # each call of the clock advances it by a quarter of a second
    monkeypatch.setattr(calling, "time", SimpleNamespace(monotonic=lambda: next(looks) / 4))
    monkeypatch.setattr(calling, "LOOK_S", 0.001)
    stop, freed = threading.Event(), threading.Event()
    looks_before_stop = 0

    def silent(request: httpx.Request) -> httpx.Response:
        nonlocal looks_before_stop
        looks_before_stop = next(looks)
        stop.set()
        freed.wait(60)
        return httpx.Response(500)

    try:
        with pytest.raises(StoppedError):
            Node.join(invite(), tmp_path, stop=stop, transport=httpx.MockTransport(silent))
    finally:
        freed.set()
    assert 1 <= (next(looks) - looks_before_stop) / 4 <= 2.5, "the node must stop after 1 to 2.5 s"


def test_an_answer_that_arrives_soon_after_the_stop_is_used(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    assert join(FakeCoordinator(), tmp_path, stop=stop).name == "w-0", "a last report was lost"


@pytest.mark.parametrize("body", ["<html>bad gateway</html>", "[" * 65_536])
def test_a_refusal_without_a_reason_is_reported_with_its_status(tmp_path: Path, body: str) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    coordinator.answers["/v1/claims"] = httpx.Response(502, text=body)
    with pytest.raises(RefusedError, match="POST /v1/claims: HTTP 502"):
        node.post("/v1/claims", None, Ok)


# --- forged answers --------------------------------------------------------------------------------------------------


def test_an_answer_that_the_coordinator_did_not_sign_is_ignored(tmp_path: Path) -> None:
    """A proxy whose coordinator is down, or an attacker in between, can neither stop a node nor deceive it."""
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path, patience_s=0.2, stop=NoPauses())
    for signer, word in ((None, "not signed"), (OTHER, "signed by")):
        coordinator.signer = signer
        for status in (200, 403, 502):
            coordinator.answers["/v1/claims"] = httpx.Response(status, json={"ok": True})
            with pytest.raises(NodeError, match=f"status {status}, but it is {word}") as caught:
                node.post("/v1/claims", None, Ok)
            assert not isinstance(caught.value, RefusedError)


@pytest.mark.parametrize("change", ["body", "status", "another request"])
def test_an_answer_that_somebody_in_between_changed_is_ignored(tmp_path: Path, change: str) -> None:
    """The coordinator's answer to another request, such as another worker's task, is ignored too."""
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path, patience_s=0.2, stop=NoPauses())
    requests: list[httpx.Request] = []

    def between(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        answer = answered(requests[0], httpx.Response(200, json={"ok": True}))
        if change == "body":
            return httpx.Response(200, json={"ok": False}, headers={**answer.headers, "content-length": "12"})
        if change == "status":
            return httpx.Response(409, content=answer.content, headers=answer.headers)
        return answer

    node.client = httpx.Client(base_url="http://c:1", auth=node.client.auth, transport=httpx.MockTransport(between))
    if change == "another request":
        assert node.post("/v1/steps", None, Ok).ok
    with pytest.raises(NodeError, match="UnsignedAnswerError"):
        node.post("/v1/steps", None, Ok)


@pytest.mark.parametrize("status", [429, 425, 503])
def test_a_request_with_a_temporary_refusal_is_signed_again_and_repeated(tmp_path: Path, status: int) -> None:
    """429: too many requests. 425: a restarted coordinator suspects a replay. 503: a service it needs does not answer."""
    coordinator, stop = FakeCoordinator(), NoPauses()
    node = join(coordinator, tmp_path, stop=stop)
    coordinator.answers["/v1/steps"] = '{"ok": true}'
    signatures: list[str] = []

    def busy_twice(request: httpx.Request) -> httpx.Response:
        signatures.append(request.headers["signature"])
        busy = httpx.Response(status, json={"error": "wait"})
        return answered(request, busy) if len(signatures) < 3 else coordinator(request)

    node.client = httpx.Client(base_url="http://c:1", auth=node.client.auth, transport=httpx.MockTransport(busy_twice))
    assert node.post("/v1/steps", None, Ok).ok and len(set(signatures)) == 3
    assert stop.pauses == pytest.approx([0.1, 0.2])


def test_a_node_polls_a_slow_coordinator_less_often(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    node.answered_in_s = 0.0
    assert node.pause_s(0.1) == 0.1
    quick = coordinator.__call__

    def slow(request: httpx.Request) -> httpx.Response:
        time.sleep(0.2)
        return quick(request)

    node.client = httpx.Client(base_url="http://c:1", auth=node.client.auth, transport=httpx.MockTransport(slow))
    node.beat()
    assert node.pause_s(0.1) >= 0.2 * (1 - WAITING_SHARE) / WAITING_SHARE


def test_an_answer_of_another_message_type_is_an_error(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    coordinator.answers["/v1/steps"] = '{"ok": true, "more": 1}'
    with pytest.raises(NodeError, match="/v1/steps: unexpected answer"):
        node.post("/v1/steps", None, Ok)


# --- large and slow answers --------------------------------------------------------------------------------------------


class Endless(httpx.SyncByteStream):
    """A body without end; `sent` counts its bytes."""

    sent = 0

    def __iter__(self) -> Iterator[bytes]:
        while self.sent < 1 << 26:  # so that the test ends even if reading never stops
            self.sent += 1 << 16
            yield bytes(1 << 16)


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    coordinator.answers["/v1/tasks/a"] = httpx.Response(200, content=bytes(5000))
    assert node.get_bytes("/v1/tasks/a", max_bytes=5000) == bytes(5000)
    for ask, path, max_bytes in (
        (lambda: node.get_bytes("/v1/tasks/a", max_bytes=4999), "/v1/tasks/a", 4999),
        (lambda: node.get("/v1/batches/1", Ok, max_bytes=4096), "/v1/batches/1", 4096),
    ):
        coordinator.answers[path] = httpx.Response(200, stream=(endless := Endless()))
        with pytest.raises(
            NodeError, match=rf"GET {path} at the coordinator http://c:1: .* more than {max_bytes} bytes"
        ) as caught:
            ask()
        assert endless.sent <= 1 << 17 and not caught.value.restart_helps


def test_a_compressed_answer_is_refused(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    node = join(coordinator, tmp_path)
    packed = httpx.ByteStream(gzip.compress(bytes(1 << 20)))
    coordinator.answers["/v1/tasks/a"] = httpx.Response(200, stream=packed, headers={"content-encoding": "gzip"})
    with pytest.raises(NodeError, match="GET /v1/tasks/a at the coordinator http://c:1: its answer is compressed"):
        node.get_bytes("/v1/tasks/a", max_bytes=1 << 21)
    assert coordinator.requests[-1].headers["accept-encoding"] == "identity"


def assert_unreachable(transport: httpx.MockTransport) -> None:
    with pytest.raises(UnreachableError):
        PoolWatch(URL, httpx.Client(transport=transport)).look()


def test_a_reader_of_open_routes_neither_reads_without_end_nor_decompresses() -> None:
    flood, packed = Endless(), Endless()
    assert_unreachable(httpx.MockTransport(lambda request: httpx.Response(200, stream=flood)))
    assert flood.sent <= 20 << 20
    accepted: list[str] = []

    def bomb(request: httpx.Request) -> httpx.Response:
        accepted.append(request.headers["accept-encoding"])
        return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=packed)

    assert_unreachable(httpx.MockTransport(bomb))
    assert set(accepted) == {"identity"} and not packed.sent


def response(pieces: Iterator[bytes]) -> httpx.Response:
    return httpx.Response(200, content=pieces, request=httpx.Request("GET", URL))


def test_reading_a_body_that_trickles_too_slowly_ends() -> None:
    clock = itertools.count(0.0, 1.0)
    with pytest.raises(httpx.ReadTimeout, match="bytes in 31 s"):
        read_body(response(b"x" for _ in range(10**6)), 10**9, lambda: next(clock))
    clock, piece = itertools.count(0.0, 1.0), bytes(MIN_BPS)
    assert len(read_body(response(piece for _ in range(100)), 10**9, lambda: next(clock))) == 100 * len(piece)


def test_a_body_may_be_exactly_as_large_as_its_limit() -> None:
    assert read_body(response(iter([b"abc"])), 3) == b"abc"
    with pytest.raises(BodyError, match="more than 2 bytes"):
        read_body(response(iter([b"abc"])), 2)


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
        here = invite().model_copy(update={"url": f"http://127.0.0.1:{server.getsockname()[1]}"})
        try:
            with pytest.raises(NodeError, match="did not answer GET /v1/run"):
                Node.of(here, OTHER, patience_s=0.5).descriptor()
        finally:
            stop.set()
