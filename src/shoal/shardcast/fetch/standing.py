"""What a downloader has learned about one server over many shards: its success rate and its speed.

Called by `sources`, which prefers servers with a high product of the two, and by the relay.
Paper: INTELLECT-2 (arXiv 2505.07291): success rate times bandwidth, with a healing factor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Standing:
    """Both figures are moving averages. Both heal with time, so a server that was down or slow is tried again."""

    WEIGHT = 0.25  # of the newest shard
    HEALS_IN_S = 30.0
    FORGOTTEN_AFTER_S = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._speed_Bps, self._measured_s = 0.0, -math.inf
        self._success, self._counted_s = 1.0, -math.inf

    def success(self) -> float:
        return 1 - (1 - self._success) * math.exp(-(self._clock() - self._counted_s) / self.HEALS_IN_S)

    def speed_Bps(self) -> float | None:
        """The speed of one shard at a time; None if it was not measured recently."""
        return self._speed_Bps if self._clock() - self._measured_s < self.FORGOTTEN_AFTER_S else None

    def delivered(self, size_bytes: int, seconds: float) -> None:
        newest_Bps = size_bytes / max(seconds, 1e-6)
        known_Bps = self.speed_Bps() or newest_Bps
        self._speed_Bps, self._measured_s = known_Bps + self.WEIGHT * (newest_Bps - known_Bps), self._clock()
        self._count(1.0)

    def slowed(self, size_bytes: int, seconds: float) -> None:
        """The server became far slower than others: replaces the average."""
        self._speed_Bps, self._measured_s = size_bytes / seconds, self._clock()

    def failed(self) -> None:
        """Lowers the success rate; the speed stays."""
        self._count(0.0)

    def _count(self, success: float) -> None:
        self._success, self._counted_s = self.success() + self.WEIGHT * (success - self.success()), self._clock()
