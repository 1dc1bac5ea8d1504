"""What a downloader has learned about one server over many requests: its success rate, its speed, how soon it answers.

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
    SILENT_S = 10.0  # how long a server that did not answer is asked after the others
    SUSPECT_S = 60.0  # how long a server that gave a bad answer is asked only where no other answers
    SILENT_ONCE_S = 1.0  # the same for shards, whose sender may only have been slow to begin

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._speed_Bps, self._measured_s = 0.0, -math.inf
        self._success, self._counted_s = 1.0, -math.inf
        self._answer_s: float | None = None
        self._unanswered, self._silent_s = 0, -math.inf  # requests in a row, and when the last one was given up
        self._bad_s = -math.inf

    def success(self) -> float:
        return 1 - (1 - self._success) * math.exp(-(self._clock() - self._counted_s) / self.HEALS_IN_S)

    def speed_Bps(self) -> float | None:
        """The speed of one shard at a time; None if it was not measured recently."""
        return self._speed_Bps if self._clock() - self._measured_s < self.FORGOTTEN_AFTER_S else None

    def silent(self) -> bool:
        """Whether it let a request wait not long ago, and has answered none since."""
        return self._unanswered > 0 and self._clock() - self._silent_s < self.SILENT_S

    def avoided(self) -> bool:
        """Whether shards come from others. After one request without an answer: for as long as one fetch of a delta takes,
        so that a fetch loses time to it only once. After two in a row: as long as it is `silent`."""
        limit_s = self.SILENT_S if self._unanswered > 1 else self.SILENT_ONCE_S
        return self._unanswered > 0 and self._clock() - self._silent_s < limit_s

    def suspect(self) -> bool:
        """Whether it gave a bad answer not long ago."""
        return self._clock() - self._bad_s < self.SUSPECT_S

    def answer_s(self) -> float | None:
        """How long it takes to answer a question, a moving average; None if it never did."""
        return self._answer_s

    def answered(self, seconds: float) -> None:
        known_s = seconds if self._answer_s is None else self._answer_s
        self._answer_s, self._unanswered = known_s + self.WEIGHT * (seconds - known_s), 0

    def unanswered(self) -> None:
        """It sent nothing while another server would have. Its success rate stays: it may only be far away."""
        self._unanswered, self._silent_s = self._unanswered + 1, self._clock()

    def answered_badly(self) -> None:
        """Its list or manifest was one that no honest server gives: too large, malformed, or not signed by the learner."""
        self._bad_s = self._clock()
        self.failed()

    def delivered(self, size_bytes: int, seconds: float) -> None:
        self._unanswered = 0
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
