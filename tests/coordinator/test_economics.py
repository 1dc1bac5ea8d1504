"""No lie pays: no strategy's expected pay exceeds its cost, and honest work earns exactly its cost.

The rules are those of `trust.share` and `credit.Escrow`, at the defaults and the lowest share of checks that they
allow. One submission's honest work costs 1 and pays 1, so honest profit is 0. If it were larger, eviction would cost a
liar more. A new key costs nothing. The liar knows every rule, and reads in the ledger which of its submissions were
checked. All its pay is credited at the run's end if it was never caught. docs/trust.md has the calculation by hand.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from shoal.config.sections import ValidatorSection
from shoal.coordinator.trust import share
from shoal.validator.judge import SPOT_ROLLOUTS

DEFAULTS = ValidatorSection()
FLOOR = 1 / DEFAULTS.escrow_checks  # the lowest floor that the config allows
LIVES, HORIZON = 1_000, 700  # keys per strategy, submissions per key

Plan = Callable[["Life"], np.ndarray]  # which keys lie in their next submission


@dataclass
class Life:
    """What a liar knows before its next submission, for each of LIVES keys."""

    number: int
    share: np.ndarray  # share of its submissions that are fully checked
    rng: np.random.Generator
    pending: np.ndarray  # number of submissions whose credit is pending


@dataclass(frozen=True)
class Lie:
    saved: float  # share of a submission's cost that the lie saves
    full: float  # probability that a full check rejects it
    spot: float  # probability that a spot check rejects it


ROLLOUTS = 64
SPOT = SPOT_ROLLOUTS


def partly(rollouts: int) -> Lie:
    """Return a lie in which this many of a submission's 64 rollouts are faked."""
    missed = np.prod([(ROLLOUTS - rollouts - drawn) / (ROLLOUTS - drawn) for drawn in range(SPOT)])
    return Lie(rollouts / ROLLOUTS, 1.0, 1.0 - max(float(missed), 0.0))


LIES = {
    "quantised weights": Lie(0.5, 1.0, 0.3),
    "quantised weights, rarely seen": Lie(0.5, 0.2, 0.0),
    "skipped work": partly(ROLLOUTS),
    "skipped work, no spot checks": Lie(1.0, 1.0, 0.0),
    "a quarter skipped": partly(ROLLOUTS // 4),
    "one rollout skipped": partly(1),
}


def always(life: Life) -> np.ndarray:
    return np.ones(LIVES, bool)


def alternation(every: int) -> Plan:
    return lambda life: np.full(LIVES, life.number % every == every - 1)


def now_and_then(chance: float) -> Plan:
    return lambda life: life.rng.random(LIVES) < chance


def when_trusted(life: Life) -> np.ndarray:
    """Be honest until checks are as rare as possible, then lie until caught."""
    return life.share <= FLOOR


def hit_and_run(hits: int) -> Plan:
    """Lie `hits` times as soon as the key is trusted, then work honestly until the lies are paid."""
    taken = np.zeros(LIVES, int)

    def plan(life: Life) -> np.ndarray:
        if life.number == 0:
            taken[:] = 0
        lies = (life.share <= FLOOR) & (taken < hits)
        taken[lies] += 1
        return lies

    return plan


def when_little_waits(life: Life) -> np.ndarray:
    """Lie when little credit is pending."""
    return (life.share < 1.0) & (life.pending <= DEFAULTS.escrow_checks)


def at_the_end(last: int) -> Plan:
    return lambda life: np.full(LIVES, life.number >= HORIZON - last)


STRATEGIES: dict[str, Plan] = {
    "always": always,
    "every second": alternation(2),
    "every tenth": alternation(10),
    "one in a hundred": now_and_then(0.01),
    "patient sybil": when_trusted,
    "hit and run, 1": hit_and_run(1),
    "hit and run, 10": hit_and_run(10),
    "when little waits": when_little_waits,
    "in the last submission": at_the_end(1),
    "in the last 20": at_the_end(20),
}


def profit(plan: Plan, lie: Lie, floor: float, checks: int) -> tuple[float, float]:
    """Return the expected pay and cost of a key."""
    rng = np.random.default_rng(0)
    shares = np.array([share(n, floor) for n in range(HORIZON + 1)])
    alive, honest_in_a_row = np.ones(LIVES, bool), np.zeros(LIVES, int)
    pay, cost = np.zeros(LIVES), np.zeros(LIVES)
    waits = np.zeros((max(checks, 1), LIVES))  # row k: submissions that were followed by k passed full checks
    for number in range(HORIZON):
        chance = shares[honest_in_a_row]
        lies = plan(Life(number, chance, rng, waits.sum(0))) & alive
        cost += alive * (1 - lie.saved * lies)
        whole = rng.random(LIVES) < chance
        caught = lies & (rng.random(LIVES) < np.where(whole, lie.full, lie.spot))
        alive &= ~caught
        waits[:, caught] = 0
        passed = whole & alive
        honest_in_a_row[passed] += 1
        pay += passed * waits[-1]
        waits = np.where(passed, np.concatenate([np.zeros((1, LIVES)), waits[:-1]]), waits)
        if checks:
            waits[0] += alive
        else:
            pay += alive
    return float((pay + waits.sum(0)).mean()), float(cost.mean())  # pending credit is paid at the run's end


@pytest.mark.parametrize("what", LIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_lie_pays_more_than_it_costs(strategy: str, what: str) -> None:
    pay, cost = profit(STRATEGIES[strategy], LIES[what], FLOOR, DEFAULTS.escrow_checks)
    assert pay <= cost + 1e-9, f"{strategy}, {what}: pays {pay:.2f} for {cost:.2f}"


def test_honest_work_is_paid_in_full() -> None:
    pay, cost = profit(lambda life: np.zeros(LIVES, bool), LIES["skipped work"], FLOOR, DEFAULTS.escrow_checks)
    assert pay == cost == HORIZON


def test_without_escrow_lies_would_pay() -> None:
    """Show that the simulation can detect a profitable lie. Here, credit is immediate, and no spot check rejects it."""
    pay, cost = profit(when_trusted, Lie(1.0, 1.0, 0.0), FLOOR, 0)
    assert pay > cost
