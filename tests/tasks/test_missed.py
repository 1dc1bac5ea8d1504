"""What missed tasks would have scored: chance for an honest worker, a lean for one that picks."""

import math
import random

import pytest

from shoal.protocol.messages import MILLION
from shoal.tasks import Task
from shoal.tasks.curriculum import Rate
from shoal.tasks.derive import GroupPlan
from shoal.tasks.missed import evidence, expected_scores, lean

TASKS = [Task(id=str(n), question="", answer="", source="hard" if n % 2 else "easy") for n in range(40)]
RATES = {n: Rate(16 * MILLION, (2 if n % 2 else 14) * MILLION) for n in range(30)}
MEANS = {"easy": 0.8, "hard": 0.2}


def plan(task: int) -> GroupPlan:
    return GroupPlan(task, 0, (1,))


def test_a_known_task_is_expected_at_its_rate_and_an_unknown_one_at_its_sources_mean() -> None:
    found = expected_scores([plan(0), plan(1), plan(38), plan(39)], TASKS, RATES, MEANS)
    assert found == pytest.approx([(14 + 3.2) / 20, (2 + 0.8) / 20, 0.8, 0.2])
    assert expected_scores([plan(38)], TASKS, RATES, {}) == [0.5]


def test_one_that_leaves_out_hard_tasks_leans_and_an_honest_one_does_not() -> None:
    draw = random.Random(0)
    scores = expected_scores([plan(draw.randrange(40)) for _ in range(400)], TASKS, RATES, MEANS)
    honest = [draw.random() < 0.1 for _ in scores]
    picked = [score < 0.5 and draw.random() < 0.2 for score in scores]
    for leaves_out, least, most in ((honest, -3.0, 3.0), (picked, -1e9, -6.0)):
        missed = [score for score, left in zip(scores, leaves_out, strict=True) if left]
        done = [score for score, left in zip(scores, leaves_out, strict=True) if not left]
        found = lean(missed, done)
        assert (found.missed, found.done) == (len(missed), len(done))
        assert least < found.lean / found.error < most
        assert found.effect == pytest.approx(found.lean * len(missed) / 400)


def test_without_a_missed_task_there_is_nothing_to_say() -> None:
    assert lean([], [0.5]).lean == 0 and lean([0.5], []).effect == 0


def test_the_evidence_for_leaving_out_hard_tasks_grows_and_an_honest_workers_is_bounded_by_chance() -> None:
    """The mean payoff of honest workers, also of those that die over long tasks: at most 1 for every bet."""
    draw = random.Random(0)
    paid: list[tuple[float, float]] = []
    for _ in range(400):
        scores = expected_scores([plan(draw.randrange(40)) for _ in range(60)], TASKS, RATES, MEANS)
        left = [draw.random() < (0.2 if score < 0.5 else 0.1) for score in scores]
        missed = [score for score, out in zip(scores, left, strict=True) if out]
        done = [score for score, out in zip(scores, left, strict=True) if not out]
        paid.append((evidence(missed, done)[0], evidence(missed, done)[1]))
    assert sum(math.exp(hard) for hard, _ in paid) / 400 < 1.2
    assert sum(math.exp(easy) for _, easy in paid) / 400 < 1.2
    scores = expected_scores([plan(draw.randrange(40)) for _ in range(400)], TASKS, RATES, MEANS)
    left = [score < 0.5 and draw.random() < 0.8 for score in scores]
    missed = [score for score, out in zip(scores, left, strict=True) if out]
    done = [score for score, out in zip(scores, left, strict=True) if not out]
    hard, easy = evidence(missed, done)
    assert hard > math.log(1e6) and easy < 0
    assert evidence(done, missed)[1] > math.log(1e6), "and so for easy ones"
    assert evidence([], []) == (0.0, 0.0)
