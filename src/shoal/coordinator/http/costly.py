"""An answer that is costly to make and that anyone may ask for as often as they like: it is made again only now and then.

    made in t seconds -> good for t / SHARE - t seconds, so making it takes at most SHARE of the coordinator's time

In a small pool the status takes a millisecond or two, and is as good as new. Among 10,000 workers it takes a second, and
every view polls it.
Invariant: what anyone may ask costs members at most SHARE of the coordinator's time, however many ask.
Called by the coordinator's open routes.
"""

import time
from collections.abc import Callable

SHARE = 0.1


class Costly:
    def __init__(self, make: Callable[[], str], monotonic: Callable[[], float] = time.monotonic) -> None:
        self.make, self.monotonic = make, monotonic
        self._made, self._until_s = b"", -1.0

    def get(self) -> bytes:
        """The answer's body, in UTF-8."""
        begun_s = self.monotonic()
        if begun_s < self._until_s:
            return self._made
        self._made = self.make().encode()
        took_s = self.monotonic() - begun_s
        self._until_s = begun_s + took_s / SHARE
        return self._made
