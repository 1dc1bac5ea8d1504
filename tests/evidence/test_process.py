"""The capital of an honest worker rarely grows, whenever one looks; that of a cheat grows, however long it was honest."""

import math

import numpy as np
import pytest

from shoal.evidence.bets import frequency
from shoal.evidence.process import FLOOR, Process


def played(counts: np.ndarray, rate: float, theta: float) -> list[float]:
    process, found = Process(), []
    for count in counts:
        process = process.after({"bet": frequency(float(count), 1.0, rate, theta)})
        found.append(process.evidence)
    return found


def test_the_capital_starts_at_one_and_stays_there_without_news() -> None:
    process = Process()
    for _ in range(100):
        process = process.after({"one": 0.0, "two": 0.0})
        assert process.evidence == pytest.approx(0.0, abs=1e-9)


def test_the_capital_is_a_martingale_exactly() -> None:
    """All outcomes of four observations that pay 3 or 1/3, at chances that make their mean 1: the capital's mean is 1."""
    total = 0.0
    for outcome in range(16):
        process, chance = Process(), 1.0
        for bit in range(4):
            up = outcome >> bit & 1
            chance *= 0.25 if up else 0.75
            process = process.after({"bet": math.log(3) if up else -math.log(3)})
        total += chance * math.exp(process.evidence)
    assert total == pytest.approx(1.0)


def test_honest_capital_exceeds_a_limit_as_rarely_as_promised() -> None:
    """At a limit of 1 / alpha = 20, so that exceeding it can be seen: at most 5 % of 2,000 workers ever do."""
    rng = np.random.default_rng(1)
    ever = sum(max(played(rng.poisson(0.5, 200), 0.5, 0.4)) >= math.log(20) for _ in range(2_000))
    assert 0 < ever <= 100


@pytest.mark.parametrize("honest", [0, 1_000])
def test_a_cheat_is_found_soon_however_long_it_was_honest(honest: int) -> None:
    rng = np.random.default_rng(2)
    counts = np.concatenate([rng.poisson(0.5, honest), rng.poisson(2.0, 100)])
    evidence = played(counts, 0.5, 0.7)
    first = next(n for n, value in enumerate(evidence) if value >= math.log(1e6))
    assert honest <= first <= honest + 40


def test_a_long_past_does_not_overflow_or_underflow() -> None:
    process = Process()
    for _ in range(300):
        process = process.after({"low": -50.0, "high": 40.0})
    assert process.money["low"] >= FLOOR and math.isfinite(process.evidence)
    assert process.strongest(1) == ["high"]
