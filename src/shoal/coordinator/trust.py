"""How often a worker's submissions are fully checked, and the sequential test over all of them.

    share = max(check_floor, 2 ^ -(n // TRUST_AFTER))       n: full checks passed in a row

Any rejection, even a soft one, resets n to 0. Every submission gets the cheap checks and a prefill of a few rollouts;
`share` is the probability that it is prefilled whole. The draw uses the system's randomness and happens when a
validator claims the submission, so nobody can predict it. Once the waiting unchecked groups are as many as a batch may
take, every submission is fully checked. The same holds while only one validator is live, because it cannot slash.

Each submission that was prefilled whole and judged by tolerances is one observation. A bet gains if the observed
figures exceed the honest bounds in `[evidence]`, and loses otherwise (`shoal.evidence`). Over all observations, these
bets detect a worker that exploits the tolerances a little at a time:

    beyond     tokens differ from their seeds' tokens more often, or by more, than honest numerics explain
    better     the differing tokens are in a group's better completions;  worse: in its worse ones
    easier     the differing tokens are in groups of higher mean reward;  harder: in groups of lower mean reward
    proof, logprob     checked values are near their limits on average, as with slightly different weights
    distribution       tokens are more, or less, likely than sampling explains
    improved, spoiled  rollouts are better, or worse, than their seeds yield (if `evidence.regenerated`)

One validator's figures dismiss nobody. Each validator's opinions on a worker are a test of their own. The evidence that
counts is the sum over all validators but the one with the most. The product of such tests is a test again.

Invariants: every worker is checked sometimes. The probability that an honest worker is ever dismissed is at most
`evidence.ALPHA`, over all bets and any length of time, if at most one validator lies. The evidence is statistical and
rests on calibration, so it slashes nobody: the worker is dismissed. It gets no more tasks, its unbatched groups are
dropped and its pending credit is forfeited (docs/trust.md). Exactly replayed submissions do not count: they have no
tolerance to exploit. A worker's evidence changes in the transaction that judges the submission, so a restart neither
loses nor repeats it.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping

from shoal.config import Config
from shoal.config.sections import Limit
from shoal.coordinator.credit import Escrow
from shoal.coordinator.database import Database
from shoal.coordinator.submissions import Submission
from shoal.evidence import ALPHA, REWARD_TILT, Process, frequency
from shoal.evidence import share as bet_share
from shoal.ledger.connection import Connection
from shoal.protocol.messages import Opinion, ToleranceSpent

SCHEMA = [
    """CREATE TABLE IF NOT EXISTS evidence (
    worker TEXT NOT NULL, validator TEXT NOT NULL, observations BIGINT NOT NULL, money TEXT NOT NULL,
    PRIMARY KEY (worker, validator))"""
]
TRUST_AFTER = 32  # passed full checks in a row that halve the share
UNCHECKED_SHARE = 0.5  # largest share of a batch's groups from submissions that were not prefilled whole
THETAS = (0.1, 0.4, 1.5, 3.0)  # a bet with theta pays best at a frequency e^theta (1.1, 1.5, 4.5, 20) times the bound
STAKES = (0.3, 0.8)  # share of the capital that a bet on an average stakes
CHOICE_STAKE = 0.8  # share of the capital that a bet on regenerated rollouts stakes
DISMISSAL_NATS = math.log(1 / ALPHA)  # evidence that dismisses a worker
# An honest mean that was not measured is assumed to be this share of its limit, because limits are 1.5 times the worst
# honest value.
UNMEASURED_MEAN = 2 / 3

log = logging.getLogger(__name__)


def share(honest_in_a_row: int, check_floor: float) -> float:
    """Return the probability that a submission is fully checked."""
    return max(check_floor, 2.0 ** -(honest_in_a_row // TRUST_AFTER))


def max_unchecked(config: Config) -> int:
    """Return how many groups of a batch may be from submissions that were not prefilled whole."""
    return int(UNCHECKED_SHARE * config.coordinator.prompts_per_step)


class EvidenceTable:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def of(self, worker: str) -> dict[str, Process]:
        """Return the evidence against a worker, by validator."""
        rows = self.connection.rows("SELECT validator, observations, money FROM evidence WHERE worker = ?", worker)
        return {validator: Process(observations, json.loads(money)) for validator, observations, money in rows}

    def all(self) -> dict[str, dict[str, Process]]:
        """Return the evidence against each worker that has some, by worker and validator."""
        workers = self.connection.rows("SELECT DISTINCT worker FROM evidence")
        return {worker: self.of(worker) for (worker,) in workers}

    def put(self, worker: str, validator: str, process: Process) -> None:
        self.connection.change(
            "INSERT INTO evidence (worker, validator, observations, money) VALUES (?, ?, ?, ?) ON CONFLICT"
            " (worker, validator) DO UPDATE SET observations = excluded.observations, money = excluded.money",
            *(worker, validator, process.observations, json.dumps(dict(process.money))),
        )

    def forget(self, worker: str) -> None:
        """Delete a worker's evidence."""
        self.connection.change("DELETE FROM evidence WHERE worker = ?", worker)


class Trust:
    def __init__(self, db: Database, config: Config, escrow: Escrow, random: Callable[[], float]) -> None:
        self.db = db
        self.config = config
        self.random = random  # uniform in [0, 1)
        self.escrow, self.evidence = escrow, EvidenceTable(db.connection)

    def share(self, worker: str) -> float:
        """Return the probability that a submission of this worker is fully checked."""
        return share(self.db.submissions.honest_in_a_row(worker), self.config.validator.check_floor)

    def draw(self, worker: str, groups: int) -> bool:
        """Draw whether a submission of this many groups is fully checked.

        Let n be the number of the worker's submissions in escrow, at most `validator.escrow_checks`. If the escrow
        holds fewer than n * `groups` groups, the submission is always fully checked. Without this rule, a worker that
        lies in a large task could risk only the credit of small ones.
        """
        if len(self.db.nodes.live_validators(self.db.clock())) < 2 or self.random() < self.share(worker):
            return True
        unchecked = self.db.groups.count_waiting_unchecked() + self.db.submissions.groups_unchecked()
        if unchecked >= max_unchecked(self.config):
            return True
        waiting, held = self.escrow.pending_of(worker)
        return held < min(waiting, self.config.validator.escrow_checks) * groups

    def observe(self, submission: Submission, validator: str, opinion: Opinion) -> str:
        """Bet on a submission that passed its checks. Return why it must still be rejected as `spending`; "" if not."""
        if (node := self.db.nodes.get(submission.worker)) is not None and node.state == "dismissed":
            return "its worker was dismissed"
        if opinion.spent is None or opinion.replay is not None:
            return ""
        process = self.evidence.of(submission.worker).get(validator, Process())
        process = process.after(bets(opinion.spent, self.config))
        self.evidence.put(submission.worker, validator, process)
        if (nats := shared_evidence(self.evidence.of(submission.worker))) < DISMISSAL_NATS:
            return ""
        return (
            f"its submissions together are e^{nats:.0f} times likelier if it exploits the limits than if it is honest,"
            f" by the figures of several validators (strongest bets: {', '.join(process.strongest(2))})"
        )

    def dismiss(self, worker: str, submission: str, why: str) -> bool:
        """Dismiss a worker; drop its open tasks and unbatched groups.

        Return False if it was already dismissed, or if the evidence does not suffice, because a verdict alone dismisses
        nobody.
        """
        processes = self.evidence.of(worker)
        nats = shared_evidence(processes)
        if nats < DISMISSAL_NATS or not self.db.nodes.move(worker, "dismiss", why, self.db.clock()):
            return False
        self.db.submissions.drop_all(worker)
        self.db.groups.mark_all_stale(worker)
        self.db.ledger.append(
            "dismissed",
            {
                "worker": worker,
                "submission": submission,
                "submissions": sum(process.observations for process in processes.values()),
                "evidence": nats,
            },
        )
        log.info("%s dismissed: %s", worker[:16], why)
        return True


def shared_evidence(processes: Mapping[str, Process]) -> float:
    """Return the evidence of all validators but the one with the most, in nats; 0 of fewer than two."""
    return sum(sorted(process.evidence for process in processes.values())[:-1])


def bets(spent: ToleranceSpent, config: Config) -> dict[str, float]:
    """Return ln of each bet's e-value for one submission, by name. `shoal.evidence` accumulates them."""
    log_values = {
        f"beyond {number} theta {theta:g}": frequency(count, spent.exposure, rate, theta)
        for number, (count, rate) in enumerate(zip(spent.beyond, config.evidence.rates, strict=True))
        for theta in THETAS
    }
    averages: tuple[Limit, ...] = ("proof_exponent_mean", "proof_mantissa_mean", "logprob_error_mean")
    for figure in averages:
        limit, honest = config.validator.widest(figure), getattr(config.evidence, figure)
        mean = UNMEASURED_MEAN if honest is None else min(honest / limit, 1.0)
        for stake in STAKES:
            log_values[f"{figure} stake {stake:g}"] = bet_share(min(getattr(spent, figure) / limit, 1.0), mean, stake)
    for name in ("better", "worse", "easier", "harder", "distribution"):
        log_values[name] = getattr(spent, name)
    if config.evidence.regenerated:
        log_values["improved"] = _choice_bet(spent.improved, spent.spoiled)
        log_values["spoiled"] = _choice_bet(spent.spoiled, spent.improved)
    return log_values


def _choice_bet(count: int, opposite: int) -> float:
    """Return ln of the e-value of a bet that near ties fall in one direction more often than with an honest worker.

    At a near tie, honest rounding can decide between two tokens. A near tie that changes the reward falls in this
    direction with probability at most REWARD_TILT / (1 + REWARD_TILT) if the worker is honest.
    """
    mean = REWARD_TILT / (1 + REWARD_TILT)
    return count * bet_share(1.0, mean, CHOICE_STAKE) + opposite * bet_share(0.0, mean, CHOICE_STAKE)
