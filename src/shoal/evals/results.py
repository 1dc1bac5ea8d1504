"""Scores become results: avg@k and pass@k with intervals, shares of what went wrong, and two models compared.

Invariant: results follow from the grades alone. A wrong format and a grader error count as 0 in every mean and are also
reported apart, so that a broken grader is not taken for a weak model.
Called by `evaluate`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.evals.completions import Answer
from shoal.tasks.task import Grade
from shoal.watch.estimates import Estimate, mean_over_questions, paired_difference, pass_at_k

Graded = tuple[Answer, Grade]


@dataclass(frozen=True)
class Result:
    """One model on one suite."""

    model: str
    suite: str
    tasks: int
    k: int
    avg: Estimate
    pass_at: Mapping[int, Estimate]  # by k
    wrong_format: float  # shares of all completions
    grader_error: float
    cut_off: float
    unrepeatable: float  # graded at a limit of time or memory
    tokens_mean: float | None
    parts: Mapping[str, float]  # mean of each of the reward's parts
    values: Sequence[float]  # mean score of each task, in the suite's order

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        del found["values"]
        return found | {"pass_at": {str(k): asdict(estimate) for k, estimate in self.pass_at.items()}}


@dataclass(frozen=True)
class Difference:
    """avg@k of `after` less that of `before`, over the same tasks."""

    suite: str
    before: str
    after: str
    avg: Estimate


def summarise(model: str, suite: str, graded: Sequence[Sequence[Graded]]) -> Result:
    """`graded`: the completions of each task, as many for each."""
    k = len(graded[0])
    values = [math.fsum(grade.score for _, grade in group) / k for group in graded]
    correct = [sum(grade.score >= 1 for _, grade in group) for group in graded]
    flat = [one for group in graded for one in group]
    tokens = [answer.tokens for answer, _ in flat if answer.tokens is not None]
    return Result(
        model=model,
        suite=suite,
        tasks=len(graded),
        k=k,
        avg=mean_over_questions(values),
        pass_at={j: mean_over_questions([pass_at_k(k, c, j) for c in correct]) for j in ks(k)},
        wrong_format=_share([grade.outcome == "wrong_format" for _, grade in flat]),
        grader_error=_share([grade.outcome == "grader_error" for _, grade in flat]),
        cut_off=_share([not answer.ended for answer, _ in flat]),
        unrepeatable=_share([not grade.repeatable for _, grade in flat]),
        tokens_mean=sum(tokens) / len(tokens) if len(tokens) == len(flat) else None,
        parts={name: _mean(flat, name) for name in sorted({name for _, grade in flat for name in grade.parts})},
        values=values,
    )


def compare(results: Sequence[Result]) -> list[Difference]:
    """Every later model with the first one, on each suite."""
    found = []
    for suite in dict.fromkeys(result.suite for result in results):
        first, *others = [result for result in results if result.suite == suite]
        for other in others:
            found.append(Difference(suite, first.model, other.model, paired_difference(first.values, other.values)))
    return found


def ks(k: int) -> list[int]:
    """Powers of two up to k, and k.

    >>> ks(1), ks(4), ks(6)
    ([1], [1, 2, 4], [1, 2, 4, 6])
    """
    return sorted({2**power for power in range(k.bit_length()) if 2**power <= k} | {k})


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits)


def _mean(flat: Sequence[Graded], name: str) -> float:
    return math.fsum(grade.parts.get(name, 0.0) for _, grade in flat) / len(flat)
