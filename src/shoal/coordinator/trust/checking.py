"""How much of a worker's work is checked in full: all at first, less with a good record, never none.

    share = max(check_floor, 2 ^ -(n // trust_after))       n: full checks passed in a row

Any rejection, also a soft one, resets n to 0. Every submission gets the cheap checks and a prefill of a few rollouts;
`share` is the probability that it is prefilled whole. The draw happens when a validator claims, from the system's
randomness, so nobody can predict it. When as many unchecked groups wait as a batch may take, every submission is checked.
What a lie earns and costs at these shares is in docs/trust.md.
Called by `submissions`.
"""

from collections.abc import Callable

from shoal.config import Config
from shoal.coordinator.state.database import Database


def share(honest_in_a_row: int, check_floor: float, trust_after: int) -> float:
    """The probability that a submission is checked in full."""
    return max(check_floor, 2.0 ** -(honest_in_a_row // trust_after))


def most_unchecked(config: Config) -> int:
    """How many groups of a batch may be of submissions that were not prefilled whole."""
    return int(config.validator.unchecked_share * config.coordinator.prompts_per_step)


class Trust:
    def __init__(self, db: Database, config: Config, random: Callable[[], float]) -> None:
        self.db = db
        self.config = config
        self.random = random  # uniform in [0, 1)

    def share(self, worker: str) -> float:
        """The probability that a submission of this worker is checked in full."""
        section = self.config.validator
        return share(self.db.submissions.honest_in_a_row(worker), section.check_floor, section.trust_after)

    def draw(self, worker: str, groups: int) -> bool:
        """Whether a submission of so many groups is checked in full.

        It always is if less waits in escrow than `validator.escrow_checks` such submissions would earn (if fewer submissions
        wait: than so many would). Else a worker could risk the pay of small tasks for a lie in a large one.
        """
        if self.random() < self.share(worker) or self._enough_unchecked():
            return True
        waiting, held = self.db.credits.waiting_of(worker)
        return held < min(waiting, self.config.validator.escrow_checks) * groups

    def _enough_unchecked(self) -> bool:
        under_way = self.db.submissions.groups_unchecked()
        return self.db.groups.count_waiting_unchecked() + under_way >= most_unchecked(self.config)
