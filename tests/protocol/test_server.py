"""The middleware of signed servers bounds and verifies bodies, and a client at its limit affects no other client."""

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from shoal.protocol import server
from shoal.protocol.identity import Identity
from shoal.protocol.pace import (
    AT_ONCE,
    BURST_S,
    DISCARD_RATE,
    LARGE_AT_ONCE,
    LARGE_BYTES,
    MAX_HOLD_S,
    MEMBER_BYTES,
    MEMBER_RATE,
    OPEN_RATE,
    REFUSED_RATE,
    STRANGERS_UNREAD,
    Pace,
    Rates,
    Refusal,
    Strangers,
    Unread,
)
from shoal.protocol.server import (
    IDENTITY,
    PIECE_BYTES,
    SLOT,
    Admission,
    Answer,
    Request,
    Route,
    body_pieces,
    read_body,
)
from shoal.protocol.signing import SignatureError, SignedHead, content_digest, sign_request


def head_of(body: bytes) -> SignedHead:
    return SignedHead("a" * 64, content_digest(body), "nonce-of-this-test", 0)


def pieces(*parts: bytes) -> Callable[[], Awaitable[bytes]]:
    left = [*parts]

    async def read() -> bytes:
        return left.pop(0) if left else b""

    return read


def test_a_body_is_returned_if_it_is_the_signed_one() -> None:
    assert asyncio.run(read_body(pieces(b"ab", b"c"), head_of(b"abc"), 3)) == b"abc"
    with pytest.raises(SignatureError, match="body changed"):
        asyncio.run(read_body(pieces(b"ab", b"d"), head_of(b"abc"), 3))


def test_a_body_is_read_up_to_its_limit_and_no_further() -> None:
    read = 0

    async def endless() -> bytes:
        nonlocal read
        read += 10
        return bytes(10)

    with pytest.raises(Refusal, match="more than 95 bytes") as caught:
        asyncio.run(read_body(endless, head_of(b""), 95))
    assert (caught.value.status, read) == (413, 100)


def test_a_body_in_tiny_segments_is_yielded_in_large_pieces() -> None:
    """A caller does much more work for a piece than it takes to read a byte."""
    body = bytes(range(256)) * 1_000
    left = [bytes([value]) for value in reversed(body)]

    async def read() -> bytes:
        return left.pop() if left else b""

    async def sizes() -> list[int]:
        return [len(piece) async for piece in body_pieces(read, head_of(body), len(body))]

    assert asyncio.run(sizes()) == [PIECE_BYTES] * 3 + [len(body) - 3 * PIECE_BYTES]


def test_a_file_that_arrives_too_slowly_is_refused() -> None:
    async def dripping() -> bytes:
        await asyncio.sleep(0.01)
        return b"x"

    async def read_all() -> None:
        async for _ in body_pieces(dripping, head_of(b""), 100, timeout_s=0.1):
            pass

    with pytest.raises(Refusal, match="bytes of the body arrived in 0.1 s") as caught:
        asyncio.run(read_all())
    assert caught.value.status == 408


def test_reading_a_body_without_end_times_out() -> None:
    async def silent() -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    async def trickling() -> bytes:
        await asyncio.sleep(0)
        return b"x"

    for read in (silent, trickling):
        with pytest.raises(Refusal, match="send the request again") as caught:
            asyncio.run(read_body(read, head_of(b""), 1 << 40, timeout_s=0.05))
        assert caught.value.status == 408


# --- pace ------------------------------------------------------------------------------------------------------------


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_member_over_its_rate_waits_and_nobody_else_does() -> None:
    pace = Pace(clock := Clock())
    for _ in range(int(MEMBER_RATE * BURST_S) + 1):
        pace.member("ann")
    with pytest.raises(Refusal) as caught:
        pace.member("ann")
    assert caught.value.status == 429
    pace.member("bob")
    clock.now_s = 1.0
    pace.member("ann")


def test_a_member_has_a_bounded_number_of_requests_in_progress() -> None:
    pace = Pace(Clock())
    held = [pace.in_progress("ann") for _ in range(AT_ONCE)]
    for request in held:
        request.__enter__()
    with pytest.raises(Refusal) as caught, pace.in_progress("ann"):
        pass
    assert caught.value.status == 429
    with pace.in_progress("bob"):
        pass
    held[0].__exit__(None, None, None)
    with pace.in_progress("ann"), pytest.raises(Refusal), pace.in_progress("ann"):
        pass


def test_refusals_are_delayed_once_there_are_many_and_never_for_long() -> None:
    strangers = Strangers(Clock())
    holds_s = [strangers.refusal_hold_s("192.0.2.1") for _ in range(int(REFUSED_RATE * (BURST_S + 2 * MAX_HOLD_S)))]
    assert holds_s[: int(REFUSED_RATE * BURST_S)] == [0.0] * int(REFUSED_RATE * BURST_S)
    assert 0 < holds_s[int(REFUSED_RATE * BURST_S)] < 1 and holds_s[-1] == max(holds_s) == MAX_HOLD_S
    assert strangers.refusal_hold_s("192.0.2.2") == 0


def test_open_routes_are_rate_limited_by_address() -> None:
    strangers = Strangers(Clock())
    for _ in range(int(OPEN_RATE * BURST_S) + 1):
        strangers.reader("192.0.2.1")
    with pytest.raises(Refusal):
        strangers.reader("192.0.2.1")
    strangers.reader("192.0.2.2")


def test_unread_answers_are_bounded_per_reader_and_for_all_strangers_together() -> None:
    unread, size_bytes = Unread(), 3 << 20
    with contextlib.ExitStack() as held:
        for number in range(STRANGERS_UNREAD // size_bytes):
            held.enter_context(unread.answer(f"192.0.2.{number}", size_bytes, member=False))
        for reader in ("192.0.2.0", "198.51.100.1"):
            with pytest.raises(Refusal, match="not been received"), unread.answer(reader, size_bytes, member=False):
                pass
        held.enter_context(unread.answer("198.51.100.1", LARGE_BYTES, member=False))
        held.enter_context(unread.answer("ann", 64 << 20, member=True))
        with pytest.raises(Refusal, match="not been received"), unread.answer("ann", size_bytes, member=True):
            pass
    with unread.answer("192.0.2.0", size_bytes, member=False):
        pass


def test_discarded_uploads_count_against_their_sender() -> None:
    pace = Pace(clock := Clock())
    wasted = 0
    with pytest.raises(Refusal) as caught:
        while True:
            pace.member("ann")
            pace.moved("ann", LARGE_BYTES)
            wasted += LARGE_BYTES
    assert caught.value.status == 429 and wasted <= 4 * MEMBER_BYTES * (BURST_S + 1)
    pace.member("bob")
    clock.now_s = BURST_S
    pace.member("ann")


def test_large_and_rare_requests_have_lower_limits() -> None:
    pace = Pace(Clock())
    with contextlib.ExitStack() as held:
        for _ in range(LARGE_AT_ONCE):
            held.enter_context(pace.in_progress("ann", large=True))
        with pytest.raises(Refusal, match="2 large requests from this node"), pace.in_progress("ann", large=True):
            pass
        with pace.in_progress("ann"), pace.in_progress("bob", large=True):
            pass
    with pytest.raises(Refusal, match="more than 1 such request a second") as caught:
        for _ in range(30):
            pace.member("ann", rare=True)
    assert caught.value.status == 429
    pace.member("ann")


def test_refused_bodies_are_read_at_a_bounded_total_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit, twenty connections that repeatedly send 64 MiB each would take three quarters of a core."""
    strangers, size_bytes = Strangers(clock := Clock()), 64 << 10
    pieces = 3 * int(DISCARD_RATE * BURST_S) // size_bytes

    class Sender:
        """A request whose body has arrived."""

        left = pieces

        @property
        def content(self) -> "Sender":
            return self

        async def readany(self) -> bytes:
            self.left -= 1
            return bytes(size_bytes) if self.left >= 0 else b""

    async def sleep(hold_s: float) -> None:
        clock.now_s += hold_s

    # Patch only this module, because a coordinator in another thread sleeps, too.
    monkeypatch.setattr(server, "asyncio", SimpleNamespace(sleep=sleep, timeout=asyncio.timeout))
    asyncio.run(server.Front(strangers)._discard(Sender()))  # type: ignore[arg-type]
    assert clock.now_s == pytest.approx(2 * BURST_S, rel=0.01)


# --- refusals of a member's requests ---------------------------------------------------------------------------------


class AnyNonce:
    def spend(self, key: str, nonce: str, created_s: int) -> bool:
        return True


def validators_route(clock: Clock, *workers: Identity) -> Route:
    """Return a route for validators of a run whose only members are these workers."""

    async def handle(request: Request) -> Answer:
        raise AssertionError

    roles = {worker.public: "worker" for worker in workers}
    return Admission("r", AnyNonce(), roles.get, clock, Pace(clock)).signed(handle, ["validator"])


def replayed(signer: Identity, **changed: str) -> web.Request:
    signed = sign_request(
        signer, method="POST", path="/x", query="", body=b"", audience="r", created_s=0, nonce="n" * 32
    )
    body: Any = SimpleNamespace(readany=pieces())
    application = web.Application()
    application[IDENTITY] = Identity.generate()
    request = make_mocked_request("POST", "/x", signed | changed, payload=body, app=application)
    request[SLOT] = contextlib.ExitStack()
    return request


def test_a_members_refused_requests_count_against_its_rate_but_forged_ones_do_not() -> None:
    worker = Identity.generate()
    route = validators_route(clock := Clock(), worker)

    def statuses(count: int, **changed: str) -> list[int]:
        return [asyncio.run(route(replayed(worker, **changed))).status for _ in range(count)]  # type: ignore[arg-type]

    burst = int(MEMBER_RATE * BURST_S) + 1
    forged = replayed(Identity.generate()).headers["signature"]
    assert set(statuses(burst, signature=forged)) == {401}
    assert statuses(burst + 1) == [403] * burst + [429]
    clock.now_s = 1.0
    assert statuses(1) == [403]


def test_refusals_of_a_member_are_delayed_whatever_their_status(monkeypatch: pytest.MonkeyPatch) -> None:
    held_s: list[float] = []

    async def sleep(hold_s: float) -> None:
        held_s.append(hold_s)

    monkeypatch.setattr(server, "asyncio", SimpleNamespace(sleep=sleep, timeout=asyncio.timeout))
    worker, other = Identity.generate(), Identity.generate()
    route, front = validators_route(clock := Clock(), worker, other), server.Front(Strangers(clock))
    for _ in range(int((REFUSED_RATE + MEMBER_RATE) * BURST_S)):
        answer = asyncio.run(front._pass(replayed(worker), route))
    assert answer.status == 429 and (held_s[0], held_s[-1]) == (0, MAX_HOLD_S)
    for sender in (other, Identity.generate()):
        asyncio.run(front._pass(replayed(sender), route))
        assert held_s[-1] == 0, "nobody else must wait"


def test_a_client_that_exceeds_its_burst_waits_and_idle_time_is_not_credited() -> None:
    rates = Rates(100.0)
    rates.charge("ann", 1_000, 0.0)  # the whole burst: ten seconds at this rate
    assert rates.wait_s("ann", 0.0) == 0
    rates.charge("ann", 500, 0.0)
    assert [rates.wait_s("ann", now_s) for now_s in (0.0, 3.0, 5.0)] == [5, 2, 0]
    assert rates.wait_s("bob", 0.0) == 0
    rates.charge("ann", 2_000, 1_000.0)
    assert rates.wait_s("ann", 1_000.0) == 10


def test_a_clock_that_is_set_back_makes_no_client_wait() -> None:
    rates = Rates(4.0)
    rates.charge("ann", 1, 1_000.0)
    assert rates.wait_s("ann", 900.0) == 0
    rates.charge("ann", 1, 900.0)
    assert rates.wait_s("ann", 900.0) == 0


def test_the_least_recently_active_clients_are_forgotten() -> None:
    rates = Rates(1.0, clients=3)
    for client in ("ann", "bob", "cy", "ann", "dee"):
        rates.charge(client, 100, 0.0)
    assert [client for client in ("ann", "bob", "cy", "dee") if rates.wait_s(client, 0.0)] == ["ann", "cy", "dee"]


@pytest.mark.parametrize("damaged", [b"", b"x", b"\xff", b"99999"])
def test_a_server_listens_on_its_last_port_while_that_is_free(tmp_path: Path, damaged: bytes) -> None:
    path, taken, asked = tmp_path / "port", [7], []

    async def start(port: int) -> tuple[Any, int]:
        asked.append(port)
        if port in taken:
            raise OSError(errno.EADDRINUSE, "in use")
        return None, port or 9

    def run(port: int) -> int:
        asked.clear()
        return asyncio.run(server.on_last_port(start, port, path))[1]

    assert run(0) == run(0) == 9 and asked == [9]
    path.write_bytes(b"7")
    assert run(0) == 9 and asked == [7, 0] and path.read_text() == "9"
    path.write_bytes(damaged)
    assert run(0) == 9 and asked == [0]
    with pytest.raises(OSError, match="in use"):
        run(7)  # the config asks for this port
    assert asked == [7] and path.read_text() == "9"
