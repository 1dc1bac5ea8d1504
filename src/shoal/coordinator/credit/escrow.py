"""Credit: what an accepted submission earns, in tokens, and when. Until then it waits, and a lie costs all that waits.

    pending     from its acceptance on
    credited    once its worker has passed `validator.escrow_checks` whole prefills of later submissions, or once the run's
                last step is trained: at once, if it is accepted after that
    forfeited   when its worker is slashed or dismissed before that

All credit waits, that of checked submissions too. So whoever lies always risks at least the pay of `escrow_checks` honest
submissions, also right after it earned trust; docs/trust.md calculates why that suffices.
Invariant: a submission's credit changes once, in the transaction of the verdict that causes it, with one entry of the
ledger. What is credited stays.
Called by `submissions` and `learning`. Left out: what a token is worth.
"""

from shoal.config import Config
from shoal.coordinator.state.database import Database


class Escrow:
    def __init__(self, db: Database, config: Config) -> None:
        self.db = db
        self.config = config

    def accepted(self, worker: str, submission: str, tokens: int) -> None:
        """Hold the credit of an accepted submission; release what this worker's checks have covered by now.

        After the run's last step no more work comes that could cover it: nothing waits any more.
        """
        self.db.credits.set_pending(submission, tokens)
        if self.db.is_trained(self.config.run.steps):
            self._credit(worker, self.db.credits.pending_of(worker))
        else:
            self._credit(worker, self.db.credits.pending_before(worker, self.config.validator.escrow_checks))

    def forfeit(self, worker: str) -> None:
        """Take all that waits."""
        lost = self.db.credits.pending_of(worker)
        for submission, _ in lost:
            self.db.credits.set_credit(submission, "forfeited")
        if lost:
            self.db.ledger.append("forfeited", _entry(worker, lost))

    def close(self) -> None:
        """Release all that waits: no more work will be asked for, so nobody has anything left to lie about."""
        for worker in self.db.credits.workers_with_pending():
            self._credit(worker, self.db.credits.pending_of(worker))

    def _credit(self, worker: str, earned: list[tuple[str, int]]) -> None:
        for submission, _ in earned:
            self.db.credits.set_credit(submission, "credited")
        if earned:
            self.db.ledger.append("credited", _entry(worker, earned))


def _entry(worker: str, found: list[tuple[str, int]]) -> dict[str, str | int | list[str]]:
    return {
        "worker": worker,
        "submissions": [submission for submission, _ in found],
        "tokens": sum(tokens for _, tokens in found),
    }
