"""Tests over all of a worker's submissions: who spends the tolerance, little by little, is found by the sum.

Each submission that was prefilled whole and judged within limits is one observation. Bets on it, each against one honest
bound of `[evidence]`:

    beyond     tokens miss their seeds' tokens more often, or by more, than honest numerics move them
    better     the misses are in a group's better completions;  worse: in its worse ones
    easier     they are in groups of higher mean reward;  harder: of lower
    proof, logprob     the figures that checks limit are near their limits on average, as with slightly other weights
    distribution       tokens are likelier, or less likely, than samples
    improved, spoiled  rollouts are better, or worse, than what their seeds yield (if `evidence.regenerated`)

Invariant: an honest worker is ever found with probability at most `evidence.alpha`, over all bets together and however long
it works. What is found is statistical and rests on calibration. So it slashes nobody: the worker is dismissed, which means
that it gets no more tasks, its unbatched groups are dropped and credit that is still pending is not paid (docs/trust.md).
Submissions of its own exactness class are not counted: they have no tolerance to spend.
Called by `submissions` with each verdict that would accept.
"""

import logging
import math

from shoal.config import Config
from shoal.coordinator.standing import states
from shoal.coordinator.state.database import Database
from shoal.coordinator.tables.submissions import Submission
from shoal.evidence.bets import frequency, share
from shoal.evidence.process import Process
from shoal.protocol.messages import Spent, Verdict

THETAS = (0.1, 0.4, 1.5, 3.0)  # ln of the excess that each bet on a frequency is best at: 1.1, 1.5, 4.5, 20 times
STAKES = (0.3, 0.8)  # of bets on averages
CHOICE_STAKE = 0.8  # of bets on rollouts generated again
SURE = (
    2 / 3
)  # of a limit: honest averages where none was measured, because limits are 1.5 times the worst honest figure

log = logging.getLogger(__name__)


class Spending:
    def __init__(self, db: Database, config: Config) -> None:
        self.db = db
        self.config = config

    def finds(self, found: Submission, verdict: Verdict) -> str:
        """Count a submission that its checks accept. Why its worker is or was dismissed; "" if it is not."""
        if self.db.evidence.is_dismissed(found.worker):
            return "its worker was dismissed"
        if verdict.spent is None or verdict.replay is not None:
            return ""
        process = self.db.evidence.of(found.worker).after(bets(verdict.spent, self.config))
        self.db.evidence.put(found.worker, process)
        if process.evidence < math.log(1 / self.config.evidence.alpha):
            return ""
        return _why(process)

    def dismiss(self, worker: str, submission: str, why: str) -> bool:
        """No more tasks. Its open task and unbatched groups are dropped. False if it was dismissed before."""
        if not self.db.evidence.dismiss(worker):
            return False
        process = self.db.evidence.of(worker)
        states.move(self.db.nodes, worker, "dismiss", why, self.db.clock())
        self.db.submissions.expire_open_of(worker)
        self.db.groups.mark_all_stale(worker)
        self.db.ledger.append(
            "dismissed",
            {
                "worker": worker,
                "submission": submission,
                "submissions": process.observations,
                "evidence": process.evidence,
                "bets": process.strongest(),
            },
        )
        log.info("%s dismissed: %s", worker[:16], why)
        return True


def bets(spent: Spent, config: Config) -> dict[str, float]:
    """ln of each bet's e-value for one submission, by name. Their capital is held by `evidence.process`."""
    found = {
        f"beyond {number} theta {theta:g}": frequency(count, spent.exposure, rate, theta)
        for number, (count, rate) in enumerate(zip(spent.beyond, config.evidence.rates, strict=True))
        for theta in THETAS
    }
    for name in ("proof_exponent_mean", "proof_mantissa_mean", "logprob_error_mean"):
        limit, honest = config.validator.widest(name), getattr(config.evidence, name)
        mean = SURE if honest is None else min(honest / limit, 1.0)
        for stake in STAKES:
            found[f"{name} stake {stake:g}"] = share(min(getattr(spent, name) / limit, 1.0), mean, stake)
    for name in ("better", "worse", "easier", "harder", "distribution"):
        found[name] = getattr(spent, name)
    if config.evidence.regenerated:
        found["improved"] = _chosen(spent.improved, spent.spoiled, config.evidence.reward_tilt)
        found["spoiled"] = _chosen(spent.spoiled, spent.improved, config.evidence.reward_tilt)
    return found


def _chosen(wished: int, others: int, tilt: float) -> float:
    """Hypothesis: a near tie that changed the reward fell this way with a chance of at most tilt / (1 + tilt)."""
    mean = tilt / (1 + tilt)
    return wished * share(1.0, mean, CHOICE_STAKE) + others * share(0.0, mean, CHOICE_STAKE)


def _why(process: Process) -> str:
    return (
        f"its {process.observations} submissions together are e^{process.evidence:.0f} times likelier if it chooses within "
        f"the limits than if it is honest (most by: {', '.join(process.strongest(2))})"
    )
