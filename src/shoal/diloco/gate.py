"""How much strangers and sites may ask of a meeting: connections, requests, bodies.

Invariant: what strangers do costs no site more than time. Only a connection whose last request a site signed stays open.
Every other is closed with its answer, and refusals to an address are held back longer the more it gets. A body is read only
after its head was verified, up to the size that its route allows, and while it keeps coming; what is left of a refused one
is read slowly and not kept. What a site may ask does not depend on its address, which it may share with others.
Called by `front` and `serve`. The listener and the rates are those of SHARDCAST's servers and the coordinator.
Left out: bandwidth, and crowds of addresses; a proxy in front has limits for them (docs/deploy.md).
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

from aiohttp import web

from shoal.diloco.messages import MeetingError
from shoal.shardcast.serve.connections import LISTENER, PATIENCE, Listener, network
from shoal.shardcast.serve.guard import Rates

# Requests a second, each with a burst of 10 s (`rates.BURST_S`).
SITE_RATE = 40.0
OPEN_RATE = 10.0  # from one address, for what anyone may read
REFUSED_RATE = 10.0  # from one address, before its refusals are held back
LONGEST_HOLD_S = 5.0
DISCARD_RATE = 8 << 20  # bytes a second of all refused bodies together
LINGER_S = 30.0  # how long the rest of a refused body is read
RARE_RATE = 1.0  # for what a site asks when it comes, heals or goes
AT_ONCE = 8  # requests of one site
LARGE_AT_ONCE = 2  # of them with an offer or an average, which is in memory
OF_ADDRESS, CONNECTIONS = 64, 1024
PIECE_S = 30.0  # for the next piece of a site's body
STRANGER_S = 10.0  # for a stranger's whole body
SITE = web.RequestKey("site", bool)


class BusyError(MeetingError):
    """One asks more than it may."""

    status = 429


class BodyError(MeetingError):
    """A body that is too large."""

    status = 413


class SlowError(MeetingError):
    """A body that does not come."""

    status = 408


class Gate:
    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._sites, self._open, self._refused = Rates(SITE_RATE), Rates(OPEN_RATE), Rates(REFUSED_RATE)
        self._rare = Rates(RARE_RATE)
        self._discarded = Rates(DISCARD_RATE, clients=1)
        self._under_way: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def site(self, request: web.Request, name: str, *, rare: bool = False, large: bool = False) -> Iterator[None]:
        """Around a request that this site signed, until its answer is sent. Raises BusyError."""
        request[SITE] = True
        asked(request)
        self._charge(self._sites, name, f"{SITE_RATE:g} requests a second by {name}")
        if rare:
            self._charge(self._rare, name, f"{RARE_RATE:g} such request a second by {name}")
        second = self._place(name, "large requests", LARGE_AT_ONCE) if large else nullcontext()
        with self._place(name, "requests", AT_ONCE), second:
            yield

    @contextmanager
    def _place(self, name: str, what: str, most: int) -> Iterator[None]:
        if self._under_way[name, what] >= most:
            raise BusyError(f"{most} {what} of {name} are under way; wait for their answers")
        self._under_way[name, what] += 1
        try:
            yield
        finally:
            self._under_way[name, what] -= 1

    def reader(self, request: web.Request) -> None:
        """Count a request for what anyone may read. Raises BusyError."""
        address = network(request.remote or "")
        self._charge(self._open, address, f"{OPEN_RATE:g} unsigned requests a second from {address}")
        asked(request)

    async def leave(self, request: web.Request, response: web.StreamResponse) -> None:
        """Before an answer is sent: a stranger's connection ends with it, and refusals wait."""
        if SITE in request:
            return
        response.force_close()
        if response.status >= 400:
            address, now_s = network(request.remote or ""), self._monotonic()
            self._refused.charge(address, 1, now_s)
            await asyncio.sleep(min(self._refused.wait_s(address, now_s), LONGEST_HOLD_S))

    async def discard(self, request: web.Request) -> None:
        """Read what is left of a refused body until it ends, its sender goes, or LINGER_S are over."""
        with suppress(TimeoutError, ConnectionError, web.RequestPayloadError):
            async with asyncio.timeout(LINGER_S):
                while piece := await request.content.readany():
                    now_s = self._monotonic()
                    self._discarded.charge("all", len(piece), now_s)
                    await asyncio.sleep(self._discarded.wait_s("all", now_s))

    def _charge(self, rates: Rates, who: str, what: str) -> None:
        now_s = self._monotonic()
        if rates.wait_s(who, now_s) > 0:
            raise BusyError(f"more than {what}; wait")
        rates.charge(who, 1, now_s)


async def read_body(request: web.Request, most_bytes: int) -> bytes:
    """The whole body. Raises BodyError, SlowError."""
    body, stranger = bytearray(), SITE not in request
    try:
        async with asyncio.timeout(STRANGER_S if stranger else None):
            while piece := await asyncio.wait_for(request.content.readany(), PIECE_S):
                body += piece
                if len(body) > most_bytes:
                    raise BodyError(f"the body has more than the {most_bytes} bytes that are taken here")
    except TimeoutError as error:
        raise SlowError("the body did not arrive in time; send the request again") from error
    return bytes(body)


def asked(request: web.Request) -> None:
    """Note that the connection of this request has a right to be open."""
    if (listener := request.app.get(LISTENER)) and request.transport:
        listener.asked(request.transport.get_extra_info("peername"))


def listen(application: web.Application, host: str, port: int) -> Listener:
    """A bound socket, watched while the application runs. Raises OSError if the address cannot be bound."""
    listener = Listener(host, port, PATIENCE, per_address=OF_ADDRESS, total=CONNECTIONS)
    application[LISTENER] = listener
    application.cleanup_ctx.append(listener.watching)
    return listener
