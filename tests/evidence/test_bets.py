"""Each bet's e-value has a mean of at most 1 under its hypothesis, at the hypothesis' worst, and more than 1 beyond it."""

import math

import numpy as np
import pytest

from shoal.evidence.bets import allocation, centre, frequency, share


def test_a_frequency_bet_pays_at_most_one_on_average() -> None:
    """Exactly, for one event of chance p: the sum over both outcomes."""
    for chance in (0.001, 0.02, 0.5):
        for theta in (0.1, 1.0, 3.0):
            mean = (1 - chance) * math.exp(frequency(0, 1.0, chance, theta)) + chance * math.exp(
                frequency(1, 1.0, chance, theta)
            )
            assert mean <= 1 + 1e-12
            beyond = (1 - 2 * chance) * math.exp(frequency(0, 1.0, chance, theta / 4)) + 2 * chance * math.exp(
                frequency(1, 1.0, chance, theta / 4)
            )
            assert chance == 0.5 or beyond > 1, "a doubled chance pays, at a small enough stake"


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
        found = centre(exposures.tolist(), values.tolist(), 3.0)
        corners = np.array(np.meshgrid(*[[1.0, 3.0]] * 6)).reshape(6, -1) * exposures[:, None]
        assert found == pytest.approx(float((values @ corners / corners.sum(0)).max()))


@pytest.mark.parametrize("sign", [1, -1])
def test_an_allocation_bet_pays_at_most_one_at_any_tilt(sign: int) -> None:
    """Poisson events: E of the product is exp of the sum over places of chance times (factor - 1), exactly."""
    exposures, values = [1.0, 2.0, 0.5, 1.0], [0.0, 1.0, 1.0, 0.25]
    values = [sign * value for value in values]
    factors = [math.exp(allocation([int(i == j) for j in range(4)], exposures, values, 2.0, 0.5)) for i in range(4)]
    for tilts in np.array(np.meshgrid(*[[1.0, 2.0]] * 4)).reshape(4, -1).T:
        chances = np.array(exposures) * tilts
        assert float(chances @ (np.array(factors) - 1)) <= 1e-9
    low = values.index(min(values))
    assert factors[low] == pytest.approx(0.5) and max(factors) > 1.05


def test_equal_values_are_no_bet() -> None:
    assert allocation([3, 2], [1.0, 1.0], [0.5, 0.5], 1.5, 0.5) == 0.0
    assert allocation([0, 0], [0.0, 0.0], [0.5, 1.0], 1.5, 0.5) == 0.0
