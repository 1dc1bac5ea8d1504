"""Estimates that are computed from scores: avg@k, pass@k, their 95 % intervals, and the paired difference of two
models.

Invariant: functions are pure and the bootstrap is seeded, so the same scores always give the same interval.

A question is the unit of resampling, because the k completions of one question are not independent (Miller 2024, "Adding
error bars to evals", arXiv 2411.00640, section 2.2). The intervals do not
include the grader's own errors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959963984540054  # 95 % of the standard normal distribution lie within ±Z
RESAMPLES = 10_000
CHUNK = 500  # number of resamples in memory at once
SEED = 20210707


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval, and the name of the interval's method."""

    mean: float
    low: float
    high: float
    method: str


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from n completions: 1 - C(n - correct, k) / C(n, k).

    Chen et al. 2021 (arXiv 2107.03374), equation 1. Raise ValueError if k exceeds n.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {correct} correct of {n} completions")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def wilson(correct: float, n: int) -> Estimate:
    """Return `correct` / n for n independent binary outcomes, with Wilson's score interval (Wilson 1927).

    `correct` may be a sum of scores between 0 and 1; the interval is then wider than needed.

    >>> half = wilson(5, 10)
    >>> round(half.low, 4), round(half.high, 4)
    (0.2366, 0.7634)
    """
    share = correct / n
    middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return Estimate(share, min(max(middle - half, 0.0), share), max(min(middle + half, 1.0), share), "wilson")


def mean_over_questions(values: Sequence[float], lowest: float = 0.0) -> Estimate:
    """Return the mean of one value per question, each in [lowest, 1], with its interval.

    If all values are 0 or 1, the interval is Wilson's. Otherwise it is the percentile bootstrap over questions (Efron
    1979), except if all values are equal, because the bootstrap of equal values has no spread. Equal values get the
    interval mean ± z²/(n + z²), whose half-width is the upper limit of Wilson's interval for a share of 0.
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
    """Return the mean of `after - before` over the same questions in the same order, with the bootstrap interval.

    Pairing removes the questions' difficulty from the comparison (Miller 2024, section 4). Raise ValueError if the
    lengths differ.
    """
    return mean_over_questions([b - a for a, b in zip(before, after, strict=True)], lowest=-1.0)


def _resampled_means(values: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(SEED)
    n = len(values)
    picks = (rng.integers(0, n, size=(CHUNK, n)) for _ in range(RESAMPLES // CHUNK))
    return np.concatenate([values[pick].mean(axis=1) for pick in picks])
