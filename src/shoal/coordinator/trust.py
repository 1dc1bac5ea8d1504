"""How much of a worker's work is checked in full: everything at first, less as it proves honest, never nothing.

    share = max(check_floor, 2 ^ -(n // trust_after))       n: full checks in a row that found it honest

Any rejection, a soft one too, sets n back to 0. Every submission gets the cheap checks; the share is of those that are
prefilled as well. The draw is made when a validator claims, from the system's randomness: nobody can foresee it.
With a lie in a share q of its work and a share s of it checked, a worker is caught within m submissions with probability
1 - (1 - q s)^m (docs/trust.md).
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
        """The share of this worker's submissions that are to be checked in full."""
        section = self.config.validator
        return max(section.check_floor, 2.0 ** -(self.honest_in_a_row(worker) // section.trust_after))

    def draw(self, worker: str) -> bool:
        """Whether its next submission is."""
        return self.random() < self.share(worker)

    def honest_in_a_row(self, worker: str) -> int:
        """Full checks passed since the last rejection."""
        found = self.db.one(
            "SELECT count(*) AS n FROM submissions WHERE worker = ? AND state = 'accepted' AND full AND seq >"
            " (SELECT coalesce(max(seq), 0) FROM submissions WHERE worker = ? AND state = 'rejected')",
            worker,
            worker,
        )
        return int(found["n"])
