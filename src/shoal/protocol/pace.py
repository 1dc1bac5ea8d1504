"""Rate limits: per member of a run, and per address for requests that no member signed.

Requests and the bytes of their answers are counted. The bytes estimate the cost of making, signing and sending answers.
Invariants: a member's limits depend neither on other members' requests nor on its address, which it may share with an
attacker. Only requests that no member signed are counted by address, for all runs of a listener together. Answers that
their readers have not received take a bounded amount of memory.
Left out: the bandwidth of rollout files, and attackers with many addresses; a proxy in front limits both
(docs/operate.md).
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.errors import ShoalError

# The next four rates are in requests per second. Each allows a burst of BURST_S.
MEMBER_RATE = 40.0  # a node sends one heartbeat per second, and a validator that waits for work sends ten claims
OPEN_RATE = 50.0  # per address, for open routes; one dashboard sends seven requests per second
REFUSED_RATE = 20.0  # per member, or per address for unsigned requests; refusals beyond it are delayed
RARE_RATE = 1.0  # per member, for joining, leaving or fetching a lost state, and for all requests of a banned key
AT_ONCE = 16  # requests of one member in progress; each may hold a body as large as its route allows
LARGE_AT_ONCE = 2  # of these, requests whose body or answer is a large file in memory
# The next two rates are in bytes per second, with the same burst.
MEMBER_BYTES = 4 << 20  # of answers to one member
OPEN_BYTES = 4 << 20  # of answers to one address, because a dashboard opened late reads a long history at once
# A byte of task data, or of a discarded upload, counts as this many bytes, because the server does not compute it.
FILE_WEIGHT = 1 / 4
# Limits on bytes of answers not yet received. If a reader has no other unread answer, a single one may exceed them.
LARGE_BYTES = 64 << 10  # smaller answers are not counted: a connection's own buffers hold them
MEMBER_UNREAD, ADDRESS_UNREAD = 16 << 20, 4 << 20
STRANGERS_UNREAD = 64 << 20  # of all addresses together
DISCARD_RATE = 8 << 20  # bytes per second, of all refused bodies together
MAX_HOLD_S = 5.0  # delay of a refusal; far below an honest client's timeout
BURST_S = 10.0  # a client may be ahead of its rate by this many seconds
MAX_CLIENTS = 100_000


class Refusal(ShoalError):
    """A request that is not served, and why; `status` is its HTTP status."""

    status = 409

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        if status is not None:
            self.status = status


class Rates:
    """How far each client is ahead of its rate, in requests or bytes. Beyond `clients`, it forgets the least recent."""

    def __init__(self, per_s: float, *, clients: int = MAX_CLIENTS, burst_s: float = BURST_S) -> None:
        self.per_s, self.clients, self.burst_s = per_s, clients, burst_s
        self._ahead: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by client: how far it was ahead, and when

    def wait_s(self, client: str, now_s: float) -> float:
        """Return how long this client must wait: zero unless it is ahead by more than a burst."""
        return max(0.0, self._ahead_of(client, now_s) / self.per_s - self.burst_s)

    def charge(self, client: str, amount: int, now_s: float) -> None:
        self._ahead[client] = (self._ahead_of(client, now_s) + amount, now_s)
        self._ahead.move_to_end(client)
        if len(self._ahead) > self.clients:
            self._ahead.popitem(last=False)

    def _ahead_of(self, client: str, now_s: float) -> float:
        ahead, then_s = self._ahead.get(client, (0.0, now_s))
        return max(0.0, ahead - self.per_s * max(0.0, now_s - then_s))  # the clock may have been set back


class Pace:
    """Rate limits of one run's members."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._members, self._rare, self._bytes = Rates(MEMBER_RATE), Rates(RARE_RATE), Rates(MEMBER_BYTES)
        self._in_progress: Counter[tuple[str, bool]] = Counter()  # requests by member, and whether they are large

    def member(self, key: str, *, rare: bool = False) -> None:
        """Count a request that this member signed. Raise Refusal with status 429 if it exceeds one of its rates."""
        now_s = self._monotonic()
        if rare and self._rare.wait_s(key, now_s) > 0:
            raise Refusal(f"more than {RARE_RATE:g} such request a second from this node; wait", 429)
        if self._members.wait_s(key, now_s) > 0:
            raise Refusal(f"more than {MEMBER_RATE:g} requests a second from this node; wait", 429)
        if self._bytes.wait_s(key, now_s) > 0:
            raise Refusal(f"more than {MEMBER_BYTES >> 20} MiB a second of answers to this node; wait", 429)
        self._members.charge(key, 1, now_s)
        if rare:
            self._rare.charge(key, 1, now_s)

    def answered(self, key: str, size_bytes: int) -> None:
        """Count an answer to this member."""
        self._bytes.charge(key, size_bytes, self._monotonic())

    def moved(self, key: str, size_bytes: int) -> None:
        """Count bytes of task data sent to this member, or of a discarded upload from it."""
        self.answered(key, int(size_bytes * FILE_WEIGHT))

    @contextmanager
    def in_progress(self, key: str, *, large: bool = False) -> Iterator[None]:
        """Count a request of this key while it is in progress. Raise Refusal with status 429 if there are too many."""
        kinds = [(key, False), (key, True)] if large else [(key, False)]
        for kind in kinds:
            limit, what = (LARGE_AT_ONCE, "large requests") if kind[1] else (AT_ONCE, "requests")
            if self._in_progress[kind] >= limit:
                raise Refusal(f"{limit} {what} from this node are in progress; wait for their answers", 429)
        self._in_progress.update(kinds)
        try:
            yield
        finally:
            for kind in kinds:
                self._in_progress[kind] -= 1
                if not self._in_progress[kind]:
                    del self._in_progress[kind]


class Strangers:
    """Rate limits of one listener's unsigned requests, by address, and the delays of all its refusals."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._open, self._bytes, self._refused = Rates(OPEN_RATE), Rates(OPEN_BYTES), Rates(REFUSED_RATE)
        self._discarded = Rates(DISCARD_RATE, clients=1)

    def reader(self, address: str) -> None:
        """Count a request to an open route. Raise Refusal with status 429 if the address exceeds a rate."""
        now_s = self._monotonic()
        if self._open.wait_s(address, now_s) > 0:
            raise Refusal(f"more than {OPEN_RATE:g} unsigned requests a second from {address}; wait", 429)
        if self._bytes.wait_s(address, now_s) > 0:
            raise Refusal(f"more than {OPEN_BYTES >> 20} MiB a second of answers to {address}; wait", 429)
        self._open.charge(address, 1, now_s)

    def answered(self, address: str, size_bytes: int) -> None:
        """Count an answer to this address."""
        self._bytes.charge(address, size_bytes, self._monotonic())

    def refusal_hold_s(self, sender: str) -> float:
        """Count the refusal of a request. Return how long to delay it. `sender`: a member's key, or an address."""
        now_s = self._monotonic()
        self._refused.charge(sender, 1, now_s)
        return min(self._refused.wait_s(sender, now_s), MAX_HOLD_S)

    def discard_hold_s(self, size_bytes: int) -> float:
        """Count bytes of a refused body. Return how long to pause before reading more."""
        now_s = self._monotonic()
        self._discarded.charge("all", size_bytes, now_s)
        return self._discarded.wait_s("all", now_s)


class Unread:
    """Answers of one listener that their readers have not received. Each is in memory until then."""

    def __init__(self, member_bytes: int = MEMBER_UNREAD) -> None:
        self.member_bytes = member_bytes
        self._bytes: Counter[str] = Counter()  # by reader: a member's key, or an address
        self._strangers_bytes = 0

    @contextmanager
    def answer(self, reader: str, size_bytes: int, *, member: bool) -> Iterator[None]:
        """Count an answer while it is sent. Raise Refusal with status 429 if the reader has too much unread."""
        if size_bytes <= LARGE_BYTES:
            yield
            return
        limit_bytes = self.member_bytes if member else ADDRESS_UNREAD
        if self._bytes[reader] and self._bytes[reader] + size_bytes > limit_bytes:
            raise Refusal("earlier answers have not been received yet; read them first", 429)
        if not member and self._strangers_bytes and self._strangers_bytes + size_bytes > STRANGERS_UNREAD:
            raise Refusal(
                "too many answers to unsigned requests have not been received yet; try again in a moment", 429
            )
        self._count(reader, size_bytes, member)
        try:
            yield
        finally:
            self._count(reader, -size_bytes, member)

    def _count(self, reader: str, size_bytes: int, member: bool) -> None:
        self._bytes[reader] += size_bytes
        if not self._bytes[reader]:
            del self._bytes[reader]
        if not member:
            self._strangers_bytes += size_bytes
