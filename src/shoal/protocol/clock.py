"""A node's clock, corrected by the coordinator's signed time where the machine's own is wrong.

An answer to a request that left at t0 and came back at t1 was signed in between, so the coordinator's clock is ahead of ours
by at least `created - t1` and at most `created + 1 - t0` (it is signed in whole seconds). An offset outside of these bounds
moves to the nearer one. Anyone who delays a request or an answer can only widen them.

Invariant: no answer takes the offset further from the truth, which lies within the bounds.
Called by `node`, which dates its requests and passes with it.
"""

import logging
import time
from collections.abc import Callable

TOLD_S = 20.0  # an offset of more than this is told to the machine's owner

log = logging.getLogger(__name__)


class PoolClock:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.offset_s = 0.0  # of the coordinator's clock to this machine's

    def __call__(self) -> float:
        """The coordinator's time."""
        return self.clock() + self.offset_s

    def heard(self, created_s: int, asked_s: float, answered_s: float) -> bool:
        """The coordinator signed at `created_s` what was asked and answered then by this machine's clock.

        Returns whether the offset changed.
        """
        least_s, most_s = created_s - answered_s, created_s + 1 - asked_s
        if least_s <= self.offset_s <= most_s:
            return False
        before_s, self.offset_s = self.offset_s, min(max(self.offset_s, least_s), most_s)
        if abs(self.offset_s) > TOLD_S and abs(self.offset_s - before_s) > TOLD_S:
            log.warning("%s; its requests carry the coordinator's time. Set this machine's clock (NTP)", self.skew())
        return True

    def skew(self) -> str:
        """How far this machine's clock is off, for a message."""
        way = "behind" if self.offset_s > 0 else "ahead of"
        return f"this machine's clock is {abs(self.offset_s):.0f} s {way} the coordinator's"
