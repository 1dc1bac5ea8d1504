"""How much one member, and one address of strangers, may ask of the coordinator.

Invariant: what a member may ask does not depend on what others ask, nor on its address: several nodes may share one with an
attacker. Only requests that nobody registered signed are counted by address, and all that an address loses by them is the
speed of its next refusals.
Called by `admission` (members) and `front` (strangers). Left out: limits on bandwidth, and on a crowd of addresses; a proxy
in front has them, see docs/deploy.md.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.coordinator.state.database import PoolError
from shoal.shardcast.serve.rates import Rates

# Requests a second, each with a burst of 10 s (`rates.BURST_S`). A node beats once a second, and a validator that waits for
# work asks ten times a second.
MEMBER_RATE = 40.0
OPEN_RATE = 50.0  # from one address, for what anyone may read: a view asks seven times a second
REFUSED_RATE = 20.0  # from one address, before its refusals are held back
AT_ONCE = 16  # requests of one member: each may hold a body of its route's limit
LONGEST_HOLD_S = 5.0  # of a refusal; far below the patience of an honest client


class Pace:
    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._members, self._open, self._refused = Rates(MEMBER_RATE), Rates(OPEN_RATE), Rates(REFUSED_RATE)
        self._under_way: Counter[str] = Counter()  # requests by member

    def member(self, key: str) -> None:
        """Count a request that this member signed. Raises PoolError with status 429 if it is over its rate."""
        now_s = self._monotonic()
        if self._members.wait_s(key, now_s) > 0:
            raise PoolError(f"more than {MEMBER_RATE:g} requests a second by this node; wait", 429)
        self._members.charge(key, 1, now_s)

    @contextmanager
    def under_way(self, key: str) -> Iterator[None]:
        """Around a request of this key. Raises PoolError with status 429 if it has too many at once."""
        if self._under_way[key] >= AT_ONCE:
            raise PoolError(f"{AT_ONCE} requests by this node are under way; wait for their answers", 429)
        self._under_way[key] += 1
        try:
            yield
        finally:
            self._under_way[key] -= 1
            if not self._under_way[key]:
                del self._under_way[key]

    def reader(self, address: str) -> None:
        """Count a request for what anyone may read. Raises PoolError with status 429 if the address is over its rate."""
        now_s = self._monotonic()
        if self._open.wait_s(address, now_s) > 0:
            raise PoolError(f"more than {OPEN_RATE:g} unsigned requests a second from {address}; wait", 429)
        self._open.charge(address, 1, now_s)

    def refusal_hold_s(self, address: str) -> float:
        """Count a refusal of a stranger; returns how long to hold it back."""
        now_s = self._monotonic()
        self._refused.charge(address, 1, now_s)
        return min(self._refused.wait_s(address, now_s), LONGEST_HOLD_S)
