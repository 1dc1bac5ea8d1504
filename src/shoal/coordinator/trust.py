"""How much of a worker's work is checked in full: all at first, less with a good record, never none.

    share = max(check_floor, 2 ^ -(n // trust_after))       n: full checks passed in a row

Any rejection, also a soft one, resets n to 0. Every submission gets the cheap checks; `share` is the probability that it
is prefilled as well. The draw happens when a validator claims, from the system's randomness, so nobody can predict it.
If a share q of a worker's submissions is false and a share s is checked, it is caught within m submissions with
probability 1 - (1 - q s)^m (docs/trust.md).
Called by `submissions`.
"""

from collections.abc import Callable

from shoal.config import Config
from shoal.coordinator.database import Database


class Trust:
    def __init__(self, db: Database, config: Config, random: Callable[[], float]) -> None:
        self.db = db
        self.config = config
        self.random = random  # uniform in [0, 1)

    def share(self, worker: str) -> float:
        """The probability that a submission of this worker is checked in full."""
        section = self.config.validator
        honest_in_a_row = self.db.submissions.honest_in_a_row(worker)
        return max(section.check_floor, 2.0 ** -(honest_in_a_row // section.trust_after))

    def draw(self, worker: str) -> bool:
        """Whether this worker's next submission is checked in full."""
        return self.random() < self.share(worker)
