"""GF(65497) against Python's big integers."""

import random

import pytest
import torch

from shoal.toploc.field import PRIME, evaluate, interpolate, inverse


def test_every_inverse_is_pythons_modular_inverse() -> None:
    assert inverse(torch.arange(1, PRIME)).tolist() == [pow(a, -1, PRIME) for a in range(1, PRIME)]


def test_zero_has_no_inverse() -> None:
    with pytest.raises(ZeroDivisionError):
        inverse(torch.tensor([3, 0]))


def test_evaluate_equals_big_integer_polynomials() -> None:
    draw = random.Random(1)
    coefficients = [[draw.randrange(PRIME) for _ in range(40)] for _ in range(3)]
    coefficients[2] = [PRIME - 1] * 40  # the largest products
    x = [[draw.randrange(PRIME) for _ in range(7)] + [0, PRIME - 1] for _ in range(3)]
    expected = [
        [sum(c * point**power for power, c in enumerate(row)) % PRIME for point in points]
        for row, points in zip(coefficients, x, strict=True)
    ]
    assert evaluate(torch.tensor(coefficients), torch.tensor(x)).tolist() == expected


@pytest.mark.parametrize("points", [1, 2, 3, 128])
def test_interpolant_passes_through_its_points(points: int) -> None:
    draw = random.Random(points)
    x_BK = torch.tensor([draw.sample(range(PRIME), points) for _ in range(5)])
    y_BK = torch.tensor([[draw.randrange(PRIME) for _ in range(points)] for _ in range(5)])
    assert torch.equal(evaluate(interpolate(x_BK, y_BK), x_BK), y_BK)


def test_interpolation_leaves_its_arguments_alone() -> None:
    x_BK, y_BK = torch.tensor([[4], [5]]), torch.tensor([[6], [7]])  # (B, 1): transposing copies nothing
    interpolate(x_BK, y_BK)
    assert (x_BK.tolist(), y_BK.tolist()) == ([[4], [5]], [[6], [7]])


def test_repeated_points_are_refused() -> None:
    with pytest.raises(ValueError, match="distinct"):
        interpolate(torch.tensor([[1, 2, 1]]), torch.tensor([[1, 2, 3]]))
