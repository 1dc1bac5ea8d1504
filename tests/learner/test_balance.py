"""Dealing rows by cost: ranks that compute rows at once compute rows of like cost."""

import random

import pytest

from shoal.learner.balance import cost, order, waiting
from shoal.learner.batch import micro_batches
from shoal.learner.metrics import Shape, forward_flops

from .support import make_groups

SHAPE = Shape(body=1000, head=64, layers=2, width=8)


def test_a_row_costs_what_its_trees_do() -> None:
    groups = make_groups()
    (row,) = micro_batches(groups, row_tokens=512, normalize_std=False)
    flops = [forward_flops(SHAPE, len(g.prompt), [len(c) for c in g.completions]) for g in groups]
    assert cost(row, SHAPE) == pytest.approx(sum(flops))


def test_one_rank_keeps_the_order_and_several_begin_with_the_costliest() -> None:
    costs = [3.0, 9.0, 1.0, 9.0]
    assert order(costs, 1) == [0, 1, 2, 3]
    assert order(costs, 2) == [1, 3, 0, 2]
    assert order([], 2) == []


def test_ranks_wait_for_the_costliest_row_of_each_turn() -> None:
    assert waiting([4.0, 2.0, 3.0, 3.0], 2) == pytest.approx(2 / 14)
    assert waiting([4.0, 2.0, 3.0], 1) == 0
    assert waiting([5.0], 2) == pytest.approx(0.5)  # the other rank has no row
    assert waiting([], 2) == 0


def test_dealing_by_cost_wastes_less_than_dealing_by_count() -> None:
    draw = random.Random(0)
    costs = [draw.uniform(1, 3) for _ in range(64)]
    dealt = [costs[number] for number in order(costs, 8)]
    assert waiting(costs, 8) > 0.2 and waiting(dealt, 8) < 0.1
