"""How much of a worker's work is checked in full, and what all of it together says.

    share = max(check_floor, 2 ^ -(n // TRUST_AFTER))       n: full checks passed in a row

Any rejection, also a soft one, resets n to 0. Every submission gets the cheap checks and a prefill of a few rollouts;
`share` is the probability that it is prefilled whole. The draw happens when a validator claims, from the system's
randomness, so nobody can predict it. When as many unchecked groups wait as a batch may take, every submission is checked.

Each submission that was prefilled whole and judged within limits is one observation. Bets on it, each against one honest
bound of `[evidence]`, find by their sum who spends the tolerance little by little:

    beyond     tokens miss their seeds' tokens more often, or by more, than honest numerics move them
    better     the misses are in a group's better completions;  worse: in its worse ones
    easier     they are in groups of higher mean reward;  harder: of lower
    proof, logprob     the figures that checks limit are near their limits on average, as with slightly other weights
    distribution       tokens are likelier, or less likely, than samples
    improved, spoiled  rollouts are better, or worse, than what their seeds yield (if `evidence.regenerated`)

Invariants: no worker is ever left unchecked. An honest worker is ever found with probability at most `evidence.ALPHA`, over
all bets together and however long it works. What is found is statistical and rests on calibration, so it slashes nobody: the
worker is dismissed. It gets no more tasks, its unbatched groups are dropped and credit that is still pending is not paid
(docs/trust.md). Submissions of its own exactness class are not counted: they have no tolerance to spend. A worker's evidence
changes in the transaction that judges the submission, so none counts twice or is forgotten by a restart.
"""

import json
import logging
import math
from collections.abc import Callable

from shoal.config import Config
from shoal.config.sections import Limit
from shoal.coordinator.credit import Escrow
from shoal.coordinator.database import Database
from shoal.coordinator.submissions import Submission
from shoal.evidence import ALPHA, REWARD_TILT, Process, frequency
from shoal.evidence import share as bet_share
from shoal.ledger.connection import Connection
from shoal.protocol.messages import ToleranceSpent, Verdict

SCHEMA = [
    """CREATE TABLE IF NOT EXISTS evidence (
    worker TEXT PRIMARY KEY, observations BIGINT NOT NULL, money TEXT NOT NULL, dismissed BOOLEAN NOT NULL DEFAULT FALSE)"""
]
TRUST_AFTER = 32  # honest submissions in a row that halve the share that is prefilled
UNCHECKED_SHARE = 0.5  # largest share of a batch's groups from submissions that were not prefilled whole
THETAS = (0.1, 0.4, 1.5, 3.0)  # ln of the excess that each bet on a frequency is best at: 1.1, 1.5, 4.5, 20 times
STAKES = (0.3, 0.8)  # of bets on averages
CHOICE_STAKE = 0.8  # of bets on rollouts generated again
SURE = 2 / 3  # of a limit: honest averages where none was measured; limits are 1.5 times the worst honest figure

log = logging.getLogger(__name__)


def share(honest_in_a_row: int, check_floor: float) -> float:
    """The probability that a submission is checked in full."""
    return max(check_floor, 2.0 ** -(honest_in_a_row // TRUST_AFTER))


def most_unchecked(config: Config) -> int:
    """How many groups of a batch may be of submissions that were not prefilled whole."""
    return int(UNCHECKED_SHARE * config.coordinator.prompts_per_step)


class EvidenceTable:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def of(self, worker: str) -> Process:
        row = self.connection.row("SELECT observations, money FROM evidence WHERE worker = ?", worker)
        return Process() if row is None else Process(row[0], json.loads(row[1]))

    def put(self, worker: str, process: Process) -> None:
        self.connection.change(
            "INSERT INTO evidence (worker, observations, money) VALUES (?, ?, ?)"
            " ON CONFLICT (worker) DO UPDATE SET observations = excluded.observations, money = excluded.money",
            *(worker, process.observations, json.dumps(dict(process.money))),
        )

    def dismiss(self, worker: str) -> bool:
        """False if it was dismissed before."""
        changed = self.connection.change(
            "UPDATE evidence SET dismissed = TRUE WHERE worker = ? AND NOT dismissed", worker
        )
        return changed == 1

    def forget(self, worker: str) -> None:
        """The worker starts again, as if nothing had been submitted."""
        self.connection.change("DELETE FROM evidence WHERE worker = ?", worker)

    def is_dismissed(self, worker: str) -> bool:
        return bool(self.connection.value("SELECT dismissed FROM evidence WHERE worker = ?", worker))


class Trust:
    def __init__(self, db: Database, config: Config, escrow: Escrow, random: Callable[[], float]) -> None:
        self.db = db
        self.config = config
        self.random = random  # uniform in [0, 1)
        self.escrow, self.evidence = escrow, EvidenceTable(db.connection)

    def share(self, worker: str) -> float:
        """The probability that a submission of this worker is checked in full."""
        return share(self.db.submissions.honest_in_a_row(worker), self.config.validator.check_floor)

    def draw(self, worker: str, groups: int) -> bool:
        """Whether a submission of this many groups is checked in full.

        It always is if less waits in escrow than `validator.escrow_checks` such submissions would earn (if fewer submissions
        wait: than that many would). Else a worker could risk the pay of small tasks for a lie in a large one.
        """
        if self.random() < self.share(worker):
            return True
        unchecked = self.db.groups.count_waiting_unchecked() + self.db.submissions.groups_unchecked()
        if unchecked >= most_unchecked(self.config):
            return True
        waiting, held = self.escrow.waiting_of(worker)
        return held < min(waiting, self.config.validator.escrow_checks) * groups

    def finds(self, submission: Submission, verdict: Verdict) -> str:
        """Count a submission that its checks accept. Why its worker is or was dismissed; "" if it is not."""
        if self.evidence.is_dismissed(submission.worker):
            return "its worker was dismissed"
        if verdict.spent is None or verdict.replay is not None:
            return ""
        process = self.evidence.of(submission.worker).after(bets(verdict.spent, self.config))
        self.evidence.put(submission.worker, process)
        if process.evidence < math.log(1 / ALPHA):
            return ""
        return (
            f"its {process.observations} submissions together are e^{process.evidence:.0f} times likelier if it chooses"
            f" within the limits than if it is honest (most by: {', '.join(process.strongest(2))})"
        )

    def dismiss(self, worker: str, submission: str, why: str) -> bool:
        """No more tasks. Its open task and unbatched groups are dropped. False if it was dismissed before."""
        if not self.evidence.dismiss(worker):
            return False
        process = self.evidence.of(worker)
        self.db.nodes.move(worker, "dismiss", why, self.db.clock())
        self.db.submissions.drop_of(worker)
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


def bets(spent: ToleranceSpent, config: Config) -> dict[str, float]:
    """ln of each bet's e-value for one submission, by name. Their capital is held by `shoal.evidence`."""
    found = {
        f"beyond {number} theta {theta:g}": frequency(count, spent.exposure, rate, theta)
        for number, (count, rate) in enumerate(zip(spent.beyond, config.evidence.rates, strict=True))
        for theta in THETAS
    }
    averages: tuple[Limit, ...] = ("proof_exponent_mean", "proof_mantissa_mean", "logprob_error_mean")
    for figure in averages:
        limit, honest = config.validator.widest(figure), getattr(config.evidence, figure)
        mean = SURE if honest is None else min(honest / limit, 1.0)
        for stake in STAKES:
            found[f"{figure} stake {stake:g}"] = bet_share(min(getattr(spent, figure) / limit, 1.0), mean, stake)
    for name in ("better", "worse", "easier", "harder", "distribution"):
        found[name] = getattr(spent, name)
    if config.evidence.regenerated:
        found["improved"] = _chosen(spent.improved, spent.spoiled, REWARD_TILT)
        found["spoiled"] = _chosen(spent.spoiled, spent.improved, REWARD_TILT)
    return found


def _chosen(wished: int, others: int, tilt: float) -> float:
    """Hypothesis: a near tie that changed the reward fell this way with a chance of at most tilt / (1 + tilt)."""
    mean = tilt / (1 + tilt)
    return wished * bet_share(1.0, mean, CHOICE_STAKE) + others * bet_share(0.0, mean, CHOICE_STAKE)
