"""Rate limits: per member of a run, and per address for requests that no member signed.

Requests are counted, and the bytes of their answers, which stand for what making, signing and sending them costs.
Invariant: what a member may ask does not depend on what others ask, nor on its address: several nodes may share one with an
attacker. Only requests that nobody registered signed are counted by address, for all runs of a listener together. Answers
that their readers do not take hold a bounded part of the memory.
Left out: the bandwidth of rollout files, and a crowd of addresses; a proxy in front limits them, see docs/operate.md.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.errors import ShoalError

# Requests a second, each with a burst of 10 s (`BURST_S`). A node beats once a second, and a
# validator that waits for work asks ten times a second.
MEMBER_RATE = 40.0
OPEN_RATE = 50.0  # from one address, for what anyone may read: a view asks seven times a second
REFUSED_RATE = 20.0  # from one address, before its refusals are held back
RARE_RATE = 1.0  # of one member, for what it asks when it comes, goes or lost its state
AT_ONCE = 16  # requests of one member: each may hold a body of its route's limit
LARGE_AT_ONCE = 2  # of them, those whose body or answer is a large file in memory
# Bytes a second, likewise with a burst of 10 s.
MEMBER_BYTES = 4 << 20  # of answers to one member
OPEN_BYTES = 4 << 20  # of answers to one address: a view that opens late reads a long run's history at once
FILE_WEIGHT = 1 / 4  # of a byte of task data, or of an upload that was not kept: neither is made here
# Bytes of answers that were made and not taken yet. One answer at a time may be larger.
LARGE_BYTES = 64 << 10  # smaller ones are not counted: a connection's own buffers hold them
MEMBER_UNTAKEN, ADDRESS_UNTAKEN = 16 << 20, 4 << 20
STRANGERS_UNTAKEN = 64 << 20  # of all addresses together
DISCARD_RATE = 8 << 20  # bytes a second of all refused bodies together
LONGEST_HOLD_S = 5.0  # of a refusal; far below the patience of an honest client


BURST_S = 10.0  # of its rate, by which a client may be ahead
MAX_CLIENTS = 100_000


class Refusal(ShoalError):
    """A request that is not served, and why; `status` is its HTTP status."""

    status = 409

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        if status is not None:
            self.status = status


class Rates:
    """How far each client is ahead of its rate, in requests or bytes. The least recent clients are forgotten."""

    def __init__(self, per_s: float, *, clients: int = MAX_CLIENTS, burst_s: float = BURST_S) -> None:
        self.per_s, self.clients, self.burst_s = per_s, clients, burst_s
        self._ahead: OrderedDict[str, tuple[float, float]] = OrderedDict()  # how much, and when

    def wait_s(self, client: str, now_s: float) -> float:
        """The time this client must wait: zero unless it is ahead by more than a burst."""
        return max(0.0, self._ahead_of(client, now_s) / self.per_s - self.burst_s)

    def charge(self, client: str, amount: int, now_s: float) -> None:
        self._ahead[client] = (self._ahead_of(client, now_s) + amount, now_s)
        self._ahead.move_to_end(client)
        if len(self._ahead) > self.clients:
            self._ahead.popitem(last=False)

    def _ahead_of(self, client: str, now_s: float) -> float:
        ahead, then_s = self._ahead.get(client, (0.0, now_s))
        return max(0.0, ahead - self.per_s * (now_s - then_s))


class Pace:
    """Rate limits of one run's members."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._members, self._rare, self._bytes = Rates(MEMBER_RATE), Rates(RARE_RATE), Rates(MEMBER_BYTES)
        self._under_way: Counter[tuple[str, bool]] = Counter()  # requests by member, and whether they are large

    def member(self, key: str, *, rare: bool = False) -> None:
        """Count a request that this member signed. Raises Refusal with status 429 if it is over one of its rates."""
        now_s = self._monotonic()
        if rare and self._rare.wait_s(key, now_s) > 0:
            raise Refusal(f"more than {RARE_RATE:g} such request a second by this node; wait", 429)
        if self._members.wait_s(key, now_s) > 0:
            raise Refusal(f"more than {MEMBER_RATE:g} requests a second by this node; wait", 429)
        if self._bytes.wait_s(key, now_s) > 0:
            raise Refusal(f"more than {MEMBER_BYTES >> 20} MiB a second of answers to this node; wait", 429)
        self._members.charge(key, 1, now_s)
        if rare:
            self._rare.charge(key, 1, now_s)

    def answered(self, key: str, size_bytes: int) -> None:
        """Count an answer that was made for this member."""
        self._bytes.charge(key, size_bytes, self._monotonic())

    def moved(self, key: str, size_bytes: int) -> None:
        """Count bytes of task data for this member, or of an upload by it that was not kept."""
        self.answered(key, int(size_bytes * FILE_WEIGHT))

    @contextmanager
    def under_way(self, key: str, *, large: bool = False) -> Iterator[None]:
        """Count a request of this key while it is in progress. Raise Refusal with status 429 if it has too many."""
        places = [(key, False), (key, True)] if large else [(key, False)]
        for place in places:
            most, what = (LARGE_AT_ONCE, "large requests") if place[1] else (AT_ONCE, "requests")
            if self._under_way[place] >= most:
                raise Refusal(f"{most} {what} by this node are under way; wait for their answers", 429)
        self._under_way.update(places)
        try:
            yield
        finally:
            for place in places:
                self._under_way[place] -= 1
                if not self._under_way[place]:
                    del self._under_way[place]


class Strangers:
    """Rate limits of one listener's unsigned requests, by address."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._open, self._bytes, self._refused = Rates(OPEN_RATE), Rates(OPEN_BYTES), Rates(REFUSED_RATE)
        self._discarded = Rates(DISCARD_RATE, clients=1)

    def reader(self, address: str) -> None:
        """Count a request for what anyone may read. Raises Refusal with status 429 if the address is over a rate."""
        now_s = self._monotonic()
        if self._open.wait_s(address, now_s) > 0:
            raise Refusal(f"more than {OPEN_RATE:g} unsigned requests a second from {address}; wait", 429)
        if self._bytes.wait_s(address, now_s) > 0:
            raise Refusal(f"more than {OPEN_BYTES >> 20} MiB a second of answers to {address}; wait", 429)
        self._open.charge(address, 1, now_s)

    def answered(self, address: str, size_bytes: int) -> None:
        """Count an answer that was made for this address."""
        self._bytes.charge(address, size_bytes, self._monotonic())

    def refusal_hold_s(self, address: str) -> float:
        """Count a refusal of a stranger; returns how long to hold it back."""
        now_s = self._monotonic()
        self._refused.charge(address, 1, now_s)
        return min(self._refused.wait_s(address, now_s), LONGEST_HOLD_S)

    def discard_hold_s(self, size_bytes: int) -> float:
        """Count bytes of a refused body; returns how long to read no more of it."""
        now_s = self._monotonic()
        self._discarded.charge("all", size_bytes, now_s)
        return self._discarded.wait_s("all", now_s)


class Untaken:
    """Answers of one listener that were made and that their readers have not taken yet. Each is in memory until then."""

    def __init__(self, member_bytes: int = MEMBER_UNTAKEN) -> None:
        self.member_bytes = member_bytes
        self._bytes: Counter[str] = Counter()  # by reader: a member's key, or an address
        self._strangers_bytes = 0

    @contextmanager
    def answer(self, reader: str, size_bytes: int, *, member: bool) -> Iterator[None]:
        """Around the sending of an answer. Raises Refusal with status 429 if too much is held for this reader already."""
        if size_bytes <= LARGE_BYTES:
            yield
            return
        most_bytes = self.member_bytes if member else ADDRESS_UNTAKEN
        if self._bytes[reader] and self._bytes[reader] + size_bytes > most_bytes:
            raise Refusal("earlier answers have not been taken yet; read them first", 429)
        if not member and self._strangers_bytes and self._strangers_bytes + size_bytes > STRANGERS_UNTAKEN:
            raise Refusal("too many unsigned requests have not taken their answers; try again in a moment", 429)
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
