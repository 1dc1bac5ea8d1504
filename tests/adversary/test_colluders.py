"""One validator that lies, alone or for a friend's worker, and honest validators that are slow, late or flaky."""

import pytest
from benchmarks.trust import honest_cost, matrix
from benchmarks.trust.matrix import ATTACKS, EXPECTED

# What one validator of three can do alone to an honest worker. docs/trust.md lists these costs.
COSTS = {
    "fewer groups than the file": "paid less",
    "rejections as inexact, with the worker's fingerprint": "unpaid",
}


def test_the_expected_cells_cover_all_attacks() -> None:
    assert list(EXPECTED) == list(ATTACKS)


@pytest.mark.parametrize("attack", ATTACKS)
def test_one_lying_validator_of_three_harms_nobody_beyond_the_documented_cost(attack: str) -> None:
    outcome = matrix.cell(ATTACKS[attack], 1)
    assert str(outcome) == EXPECTED[attack][0]
    assert outcome.honest == COSTS.get(attack, "paid")


@pytest.mark.parametrize("attack", [pytest.param(name, marks=pytest.mark.slow) for name in ATTACKS])
@pytest.mark.parametrize("colluders", [2, 3])
def test_what_two_and_three_colluding_validators_can_do(attack: str, colluders: int) -> None:
    assert str(matrix.cell(ATTACKS[attack], colluders)) == EXPECTED[attack][colluders - 1]


def test_a_friend_of_one_validator_is_paid_for_a_limited_time() -> None:
    """It gets through 32 lies on average. The last `escrow_checks` of them are never paid."""
    life = matrix.lies_until_found(seed=4)
    assert life["found"] and life["paid"] <= max(life["accepted"] - 16, 0)


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_no_honest_worker_pays_for_a_validators_faults(seed: int) -> None:
    pool = honest_cost.pool(seed)
    assert pool.steps == honest_cost.STEPS
    assert (pool.punished, pool.unpaid) == (0, 0)
