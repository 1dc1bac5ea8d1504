"""Estimators are compared with known values, enumeration and simulation. All random numbers are seeded."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from shoal.watch import estimates
from shoal.watch.estimates import Estimate, mean_over_questions, paired_difference, pass_at_k, wilson


@pytest.mark.parametrize(("n", "correct"), [(1, 0), (1, 1), (4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_of_k_with_a_correct_completion(n: int, correct: int) -> None:
    outcomes = [True] * correct + [False] * (n - correct)
    for k in range(1, n + 1):
        drawn = [any(subset) for subset in itertools.combinations(outcomes, k)]
        assert pass_at_k(n, correct, k) == pytest.approx(sum(drawn) / len(drawn))


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_impossible_arguments(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(n, correct, k)


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)]
)
def test_wilson_intervals_equal_the_published_ones(correct: int, n: int, low: float, high: float) -> None:
    estimate = wilson(correct, n)
    assert (round(estimate.low, 4), round(estimate.high, 4)) == (low, high)
    assert estimate.mean == correct / n


def test_binary_values_get_wilson_intervals_and_graded_values_bootstrap_intervals() -> None:
    assert mean_over_questions([0.0, 1.0, 1.0, 0.0]) == wilson(2, 4)
    estimate = mean_over_questions([0.0, 0.5, 1.0, 0.25])
    assert estimate.method == "bootstrap over questions"
    assert estimate.low < estimate.mean < estimate.high


def test_the_same_scores_give_the_same_interval() -> None:
    values = list(np.random.default_rng(1).integers(0, 5, 40) / 4)
    assert mean_over_questions(values) == mean_over_questions(values)


def test_equal_values_get_an_interval_of_nonzero_width() -> None:
    assert mean_over_questions([0.5] * 20).high > 0.6
    zeros, none_correct = mean_over_questions([0.0] * 20), wilson(0, 20)
    assert (zeros.low, zeros.high) == (none_correct.low, none_correct.high)
    same = paired_difference([0.0, 1.0, 0.5], [0.0, 1.0, 0.5])
    assert same.mean == 0
    assert same.low < 0 < same.high


def test_a_paired_difference_has_the_sign_of_the_change_and_stays_in_range() -> None:
    estimate = paired_difference([0.0] * 10, [1.0] * 9 + [0.0])
    assert estimate.mean == pytest.approx(0.9)
    assert 0.5 < estimate.low <= estimate.high <= 1
    assert paired_difference([1.0, 1.0], [0.0, 0.0]).low == -1


def test_a_paired_difference_needs_the_same_questions() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired_difference([0.0], [0.0, 1.0])


Draw = Callable[[np.random.Generator], tuple[list[float], float]]


def binary(rng: np.random.Generator) -> tuple[list[float], float]:
    return list((rng.random(60) < 0.2).astype(float)), 0.2


def avg_at_4(rng: np.random.Generator) -> tuple[list[float], float]:
    return list(rng.binomial(4, rng.beta(0.5, 1.0, 60)) / 4), 1 / 3


def pass_at_2_of_4(rng: np.random.Generator) -> tuple[list[float], float]:
    # pass@2 of a question with rate p is 1 - (1 - p)². Its mean over p ~ Beta(0.5, 1) is 1 - (1 - 2/3 + 1/5) = 7/15.
    return [pass_at_k(4, int(c), 2) for c in rng.binomial(4, rng.beta(0.5, 1.0, 60))], 7 / 15


@pytest.mark.parametrize("draw", [binary, avg_at_4, pass_at_2_of_4])
def test_intervals_cover_the_truth_at_their_nominal_rate(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "RESAMPLES", 1_000)
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(400):
        values, truth = draw(rng)
        estimate: Estimate = mean_over_questions(values)
        covered += estimate.low <= truth <= estimate.high
    assert 0.91 <= covered / 400 <= 0.985  # the nominal rate is 95 %; the measured one has a standard error of 1.1 %
