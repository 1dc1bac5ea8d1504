"""The math reward against `math_cases.txt`: completions as models write them, hard equivalences, and what must not be equal.

In one process: how a comparison is bounded and ended is the matter of `test_math.py`.
"""

from pathlib import Path

import pytest

from shoal.sandbox import CallResult
from shoal.tasks.inside import equality
from shoal.tasks.rewards.math import Math
from shoal.tasks.task import Grade, Task

Case = tuple[str, ...]  # score, gold answer, completion
CASES: list[Case] = [
    tuple(line.replace("⏎", "\n").split(" ¦ "))
    for line in Path(__file__).with_name("math_cases.txt").read_text("utf-8").splitlines()
    if line and not line.startswith("#")
]
LONG: list[Case] = [
    ("1", "10^{400}", "1" + "0" * 400), ("1", "1" + "0" * 400, "10" + ",000" * 133), ("1", "9" * 900, "9" * 900),
    ("0", "10^{400}", "1" + "0" * 399), ("0", "9" * 900, "9" * 899 + "8"), ("0", "18", "9" * 5000),
]  # fmt: skip
CASES += [(score, gold, rf"\boxed{{{answer}}}") for score, gold, answer in LONG]
# Wrong, and known: each would cost more to mend than it is worth.
KNOWN_LIMITS: list[tuple[str, str, int]] = [
    (r"x^2=1", r"x=\pm 1", 0),  # an equation and its solutions
    ("two", "2", 0),  # numbers in words
    (r"\text{Monday and Tuesday}", "Tuesday, Monday", 0),
    ("10^{30000}", r"10^{29999}\cdot 10", 0),  # more than MAX_DIGITS
    ("5", "6=5", 1),  # of a chain of equations the last side counts, true or not
    ("5", r"5\approx 6", 1),  # of an approximation the first
    ("5 cm", "5 km", 1),  # units are dropped
    ("9", r"900\%", 1),  # a percentage is a share and a number
    ("9", r"9\%", 1),
    ("N", "n", 1),  # case
    (r"\{1,2\}", "(1,2)", 1),  # a pair, an open interval and a list of two look alike
    ("0.5", "0.4999999", 1),  # six decimals
    ("10^{400}+0.5", "10^{400}", 1),  # and fifteen digits
]


def graded(reward: Math, cases: list[Case]) -> list[Grade]:
    return reward.grade([Task("t", "", gold) for _, gold, _ in cases], [completion for _, _, completion in cases])


@pytest.fixture(scope="module")
def here() -> Math:
    reward = Math()
    reward.grader.calls = lambda values: [compared(*value) for value in values]  # type: ignore[method-assign]
    return reward


@pytest.fixture(scope="module")
def grades(here: Math) -> dict[Case, Grade]:
    return dict(zip(CASES, graded(here, CASES), strict=True))


def compared(gold: str, answer: str) -> CallResult:
    try:
        return CallResult("answered", equality.compare(gold, answer), repeatable=True)
    except Exception as error:  # noqa: BLE001  what the library raises is a grader error
        return CallResult("raised", detail=str(error), repeatable=True)


def test_the_table_is_large_and_has_many_wrong_answers() -> None:
    assert len(set(CASES)) == len(CASES) >= 600
    assert sum(score == "0" for score, _, _ in CASES) >= 200


def test_no_wrong_answer_scores(grades: dict[Case, Grade]) -> None:
    """These train a model to be wrong."""
    assert not [case[1:] for case, grade in grades.items() if case[0] == "0" and grade.score]


def test_every_right_answer_scores(grades: dict[Case, Grade]) -> None:
    assert not [case[1:] for case, grade in grades.items() if case[0] == "1" and not grade.score]


def test_no_answer_makes_the_library_fail(grades: dict[Case, Grade]) -> None:
    assert not [case[1:] for case, grade in grades.items() if grade.outcome == "grader_error"]


@pytest.mark.parametrize(("gold", "answer", "score"), KNOWN_LIMITS)
def test_known_limits(here: Math, gold: str, answer: str, score: int) -> None:
    assert graded(here, [("", gold, rf"\boxed{{{answer}}}")])[0].score == score


@pytest.mark.parametrize("form", ["{}", "The answer is {}.", "So it is ${}$."])
def test_without_a_box_the_grade_is_the_same(here: Math, form: str) -> None:
    numbers = [("18", "18 dollars"), ("1000", "1,000"), ("18", "19"), ("-3", "3")]
    pairs = [(r"\frac{1}{2}", "0.5"), (r"\sqrt{8}", r"2\sqrt{2}"), *numbers]
    found = graded(here, [("", gold, form.format(answer)) for gold, answer in pairs])
    assert [grade.score for grade in found] == [1, 1, 1, 1, 0, 0]


def test_the_same_pairs_get_the_same_grades_in_any_order_and_process(grades: dict[Case, Grade]) -> None:
    cases = CASES[::-13]
    elsewhere = Math(size=2)
    found = graded(elsewhere, cases)
    elsewhere.close()
    assert [(one.score, one.outcome, one.detail) for one in found] == [
        (grades[case].score, grades[case].outcome, grades[case].detail) for case in cases
    ]
