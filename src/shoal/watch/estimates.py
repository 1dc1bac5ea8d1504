"""What a sample of scores says: avg@k, pass@k, their 95 % intervals, and the difference of two models on the same tasks.

Invariant: pure functions, the bootstrap's random numbers are seeded, so the same scores always give the same interval.
Called by `evals` and by the report of a run.

A question is the unit of resampling, because the k completions of one question are not independent (Miller 2024, "Adding
error bars to evals", arXiv 2411.00640, section 2.2). Left out: the uncertainty of the grader, and that of the temperature.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959963984540054  # of the standard normal distribution: 95 % lie within
RESAMPLES = 10_000
CHUNK = 500  # resamples at a time, to bound memory
SEED = 20210707


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval, and the name of the interval's method."""

    mean: float
    low: float
    high: float
    method: str


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that at least one of k completions is correct, without bias, from `correct` of n: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021 (arXiv 2107.03374), equation 1. Raises ValueError if k exceeds n.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {correct} correct of {n} completions")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def wilson(correct: float, n: int) -> Estimate:
    """The share of n independent yes-or-no outcomes, with Wilson's score interval (Wilson 1927).

    For scores between 0 and 1, whose sum is `correct`, the interval is wider than need be.

    >>> found = wilson(5, 10)
    >>> round(found.low, 4), round(found.high, 4)
    (0.2366, 0.7634)
    """
    share = correct / n
    middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return Estimate(share, min(max(middle - half, 0.0), share), max(min(middle + half, 1.0), share), "wilson")


def mean_over_questions(values: Sequence[float], lowest: float = 0.0) -> Estimate:
    """The mean of one value per question, each in [lowest, 1].

    Values that are all 0 or 1 get Wilson's interval. Others get the percentile bootstrap over questions (Efron 1979). Equal
    values have no spread to resample: they get ± z²/(n + z²), which is Wilson's interval at 0 and at 1.
    """
    n = len(values)
    mean = math.fsum(values) / n
    if lowest == 0 and set(values) <= {0.0, 1.0}:
        return wilson(int(sum(values)), n)
    if max(values) - min(values) < 1e-12:
        half = Z * Z / (n + Z * Z)
        return Estimate(mean, max(mean - half, lowest), min(mean + half, 1.0), "no spread")
    low, high = np.quantile(_resampled_means(np.asarray(values)), [0.025, 0.975])
    return Estimate(mean, float(low), float(high), "bootstrap over questions")


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Mean of after - before over the same questions in the same order, with the bootstrap over questions.

    Pairs remove the questions' difficulty from the comparison (Miller 2024, section 4). Raises ValueError if the numbers
    of questions differ.
    """
    return mean_over_questions([b - a for a, b in zip(before, after, strict=True)], lowest=-1.0)


def _resampled_means(values: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(SEED)
    n = len(values)
    picks = (rng.integers(0, n, size=(CHUNK, n)) for _ in range(RESAMPLES // CHUNK))
    return np.concatenate([values[pick].mean(axis=1) for pick in picks])
