"""What a worker's missed tasks would have scored: whether it leaves out what it expects to get wrong, or right.

A worker sees its assignment's tasks, and its own completions, before it uploads. So it can leave out a submission by not
uploading it. The coordinator counts these and makes them expensive (`coordinator/arrivals`); here is what they were
worth.

    expected score of a task = (its score so far + PRIOR * its source's mean) / (its rollouts so far + PRIOR)
    lean                     = mean expected score of what was missed - that of what was done
    effect on the mean       = share missed * lean                  what leaving them out took from, or added to, the mean

An honest worker misses tasks for reasons that do not know the task, so its lean is 0 but for chance. A lean below 0 means
that hard tasks are left out. What a worker sees only in its own completions does not show here.

`evidence` bets on the same, as `coordinator/trust` does on tokens: e^nats is paid with a mean of at most 1 if the
worker is honest and TILT bounds how much likelier it misses one task than another. It is for a person to look at: it
dismisses nobody, because anyone who can cut a worker's connection chooses what that worker misses.

Invariant: pure functions of derived plans and accepted scores; nothing that the worker says enters.
Called by everything that judges a worker over many submissions; `GET /v1/missed/{key}` has the assignments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, pvariance

from shoal.evidence import allocation
from shoal.protocol.messages import MILLION
from shoal.tasks.curriculum import Rates
from shoal.tasks.derive import GroupPlan
from shoal.tasks.task import Task

PRIOR = 4.0  # rollouts, at the source's mean, that every task begins with
TILT = 2.0  # hard tasks take longer, so that an honest worker that dies now and then misses more of them
STAKE = 0.5


@dataclass(frozen=True)
class Lean:
    """What was missed against what was done."""

    missed: int  # groups
    done: int
    lean: float  # difference of the mean expected scores; 0 if either is empty
    error: float  # its standard error
    effect: float  # on the worker's mean score


def expected_scores(
    plans: Sequence[GroupPlan], tasks: Sequence[Task], rates: Rates, source_means: Mapping[str, float]
) -> list[float]:
    """The expected score of each planned group. `rates`: accepted rollouts by task; unknown sources are expected at 1/2."""
    found = []
    for plan in plans:
        mean = source_means.get(tasks[plan.task_index].source, 0.5)
        rate = rates.get(plan.task_index)
        rollouts, score = (0.0, 0.0) if rate is None else (rate.rollouts / MILLION, rate.score / MILLION)
        found.append((score + PRIOR * mean) / (rollouts + PRIOR))
    return found


def lean(missed: Sequence[float], done: Sequence[float]) -> Lean:
    """Compare the expected scores of missed groups with those of groups that the same worker delivered."""
    if not missed or not done:
        return Lean(len(missed), len(done), 0.0, 0.0, 0.0)
    difference = fmean(missed) - fmean(done)
    error = sqrt(pvariance(missed) / len(missed) + pvariance(done) / len(done))
    share = len(missed) / (len(missed) + len(done))
    return Lean(len(missed), len(done), difference, error, share * difference)


def evidence(missed: Sequence[float], done: Sequence[float]) -> tuple[float, float]:
    """Nats for a worker that leaves out hard tasks, and for one that leaves out easy ones."""
    counts, values = [1] * len(missed) + [0] * len(done), [*missed, *done]
    if not values:
        return 0.0, 0.0
    hard, easy = (
        allocation(counts, [1.0] * len(values), [sign * value for value in values], TILT, STAKE) for sign in (-1, 1)
    )
    return hard, easy
