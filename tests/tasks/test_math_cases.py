"""The math reward against `math_cases.txt`: completions as models write them, right and wrong.

In one process: how a comparison is bounded and ended is the matter of `test_math.py`.
"""

from pathlib import Path

import pytest

from shoal.sandbox import Call
from shoal.tasks.inside import equality
from shoal.tasks.rewards.math import Math
from shoal.tasks.task import Task

CASES = [
    tuple(line.replace("⏎", "\n").split(" ¦ "))
    for line in Path(__file__).with_name("math_cases.txt").read_text("utf-8").splitlines()
    if line and not line.startswith("#")
]


@pytest.fixture(scope="module")
def scores() -> dict[tuple[str, ...], float]:
    reward = Math()
    reward.grader.calls = lambda values: [compared(*value) for value in values]  # type: ignore[method-assign]
    grades = reward.grade([Task("t", "", gold) for _, gold, _ in CASES], [completion for _, _, completion in CASES])
    return dict(zip(CASES, [grade.score for grade in grades], strict=True))


def compared(gold: str, answer: str) -> Call:
    try:
        return Call("answered", equality.compare(gold, answer))
    except Exception as error:  # noqa: BLE001  what the library raises is a grader error
        return Call("raised", detail=str(error))


def test_the_table_is_large_and_has_many_wrong_answers() -> None:
    assert len(set(CASES)) == len(CASES) >= 250
    assert sum(score == "0" for score, _, _ in CASES) >= 80


def test_no_wrong_answer_scores(scores: dict[tuple[str, ...], float]) -> None:
    """These train a model to be wrong."""
    assert not [case[1:] for case, score in scores.items() if case[0] == "0" and score]


def test_every_right_answer_scores(scores: dict[tuple[str, ...], float]) -> None:
    assert not [case[1:] for case, score in scores.items() if case[0] == "1" and not score]
