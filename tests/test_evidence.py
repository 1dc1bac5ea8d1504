"""A bet pays at most 1 on average if its null hypothesis holds, else more. An honest worker's capital rarely grows."""

import math

import numpy as np
import pytest
import torch

from shoal.evidence import FLOOR, Process, allocation, centre, frequency, share, within

FIGURES = [0.0, -0.0, 5e-324, 0.5, 1.0, 1.0000001, math.nan, math.inf, -math.inf, -5e-324, -1.0]
PASS = [True, True, True, True, True, False, False, False, False, False, False]


def test_only_what_is_finite_and_inside_passes_a_judge() -> None:
    assert [within(figure, 1.0) for figure in FIGURES] == PASS
    assert within(torch.tensor(FIGURES, dtype=torch.float64), 1.0).tolist() == PASS
    assert within(np.array(FIGURES), 1.0).tolist() == PASS
    assert not within(0.5, math.nan) and not within(math.inf, math.inf) and within(2, 2)


def test_a_frequency_bet_pays_at_most_one_on_average() -> None:
    """The test computes the mean over both outcomes of one event exactly."""
    for chance in (0.001, 0.02, 0.5):
        for theta in (0.1, 1.0, 3.0):
            mean = (1 - chance) * math.exp(frequency(0, 1.0, chance, theta)) + chance * math.exp(
                frequency(1, 1.0, chance, theta)
            )
            assert mean <= 1 + 1e-12
            beyond = (1 - 2 * chance) * math.exp(frequency(0, 1.0, chance, theta / 4)) + 2 * chance * math.exp(
                frequency(1, 1.0, chance, theta / 4)
            )
            assert chance == 0.5 or beyond > 1, (
                "a bet must pay more than 1 if the chance is doubled and the stake is small enough"
            )


def test_a_share_bet_pays_exactly_one_at_the_bound() -> None:
    for stake in (0.1, 0.5, 0.9):
        values = np.array([0.0, 0.2, 1.0])
        weights = np.array([0.4, 0.4, 0.2])
        mean = float(values @ weights)
        paid = sum(w * math.exp(share(float(v), mean, stake)) for v, w in zip(values, weights, strict=True))
        assert paid == pytest.approx(1.0)


def test_the_centre_is_the_largest_mean_under_any_tilt() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        exposures, values = rng.uniform(0.1, 2, 6), rng.normal(size=6)
        corners = np.array(np.meshgrid(*[[1.0, 3.0]] * 6)).reshape(6, -1) * exposures[:, None]
        expected = float((values @ corners / corners.sum(0)).max())
        assert centre(exposures.tolist(), values.tolist(), 3.0) == pytest.approx(expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_an_allocation_bet_pays_at_most_one_at_any_tilt(sign: int) -> None:
    """For Poisson events, the mean of the product is exactly exp(sum over places of chance * (factor - 1))."""
    exposures, values = [1.0, 2.0, 0.5, 1.0], [0.0, 1.0, 1.0, 0.25]
    values = [sign * value for value in values]
    factors = [math.exp(allocation([int(i == j) for j in range(4)], exposures, values, 2.0, 0.5)) for i in range(4)]
    for tilts in np.array(np.meshgrid(*[[1.0, 2.0]] * 4)).reshape(4, -1).T:
        chances = np.array(exposures) * tilts
        assert float(chances @ (np.array(factors) - 1)) <= 1e-9
    low = values.index(min(values))
    assert factors[low] == pytest.approx(0.5) and max(factors) > 1.05


def test_equal_values_pay_0_nats() -> None:
    assert allocation([3, 2], [1.0, 1.0], [0.5, 0.5], 1.5, 0.5) == 0.0
    assert allocation([0, 0], [0.0, 0.0], [0.5, 1.0], 1.5, 0.5) == 0.0


def evidence(counts: np.ndarray, rate: float, theta: float) -> list[float]:
    """Return the evidence after each count."""
    process, result = Process(), []
    for count in counts:
        process = process.after({"bet": frequency(float(count), 1.0, rate, theta)})
        result.append(process.evidence)
    return result


def test_bets_that_pay_0_nats_leave_the_capital_at_1() -> None:
    process = Process()
    for _ in range(100):
        process = process.after({"one": 0.0, "two": 0.0})
        assert process.evidence == pytest.approx(0.0, abs=1e-9)


def test_the_capital_is_a_martingale() -> None:
    """Each of four observations pays 3 or 1/3, with mean 1. The test computes the mean of their product exactly."""
    total = 0.0
    for outcome in range(16):
        process, chance = Process(), 1.0
        for bit in range(4):
            up = outcome >> bit & 1
            chance *= 0.25 if up else 0.75
            process = process.after({"bet": math.log(3) if up else -math.log(3)})
        total += chance * math.exp(process.evidence)
    assert total == pytest.approx(1.0)


def test_honest_capital_exceeds_1_over_alpha_for_at_most_a_fraction_alpha_of_workers() -> None:
    """In this test 1 / alpha is 20, so that some of the 2,000 workers exceed it, but at most 5 %."""
    rng = np.random.default_rng(1)
    ever = sum(max(evidence(rng.poisson(0.5, 200), 0.5, 0.4)) >= math.log(20) for _ in range(2_000))
    assert 0 < ever <= 100


@pytest.mark.parametrize("honest", [0, 1_000])
def test_a_cheat_is_detected_soon_however_long_it_was_honest(honest: int) -> None:
    rng = np.random.default_rng(2)
    counts = np.concatenate([rng.poisson(0.5, honest), rng.poisson(2.0, 100)])
    first = next(n for n, nats in enumerate(evidence(counts, 0.5, 0.7)) if nats >= math.log(1e6))
    assert honest <= first <= honest + 40


def test_many_observations_do_not_overflow_or_underflow() -> None:
    process = Process()
    for _ in range(300):
        process = process.after({"low": -50.0, "high": 40.0})
    assert process.money["low"] >= FLOOR and math.isfinite(process.evidence)
    assert process.strongest(1) == ["high"]
