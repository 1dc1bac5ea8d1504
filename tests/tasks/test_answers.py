"""The reward `number`: which number of a completion is its answer."""

import pytest

from shoal.tasks.rewards.answers import Number
from shoal.tasks.task import Task

NUMBER = Number()


@pytest.mark.parametrize(
    ("expected", "answer", "grade"),
    [
        ("70000", "So he made $70,000.", 1),
        ("70000", "70000", 1),
        ("70000", "#### 70,000", 1),
        ("70000", "70,000.00 dollars", 1),
        ("70000", r"\boxed{\$70{,}000}", 1),
        ("70000", r"\boxed{70000} in 2 years", 1),  # the box counts
        ("70000", r"\boxed{2}, no, \boxed{70000}", 1),  # the last one
        ("70000", r"\boxed{x} or 70000", 1),  # a box without a number does not
        ("70000", "70,0000", 0),
        ("70000", "70 000", 0),
        ("70000", "70000 or 5", 0),  # the last number counts
        ("18", "eighteen", 0),
        ("18", "", 0),
        ("18", "\u0661\u0668", 0),  # digits of another script
        ("18", "9" * 10_000, 0),  # longer than int() reads
        ("18", "18.0000000000000000000000000001", 0),  # exactly, not as floats
        ("18", "16+2=18", 1),
        ("3", "8-5=3", 1),
        ("5", "8-5", 1),  # no operand is a sign
        ("-5", "a loss of -5", 1),
        ("-5", "-$5", 1),
        ("-5", "\u22125", 1),
        ("5", ".5", 0),
        ("0.5", ".50", 1),
        ("0", "-0.0", 1),
        ("5", "1, 2, 5,", 1),
    ],
)
def test_the_last_number_is_the_answer(expected: str, answer: str, grade: float) -> None:
    [found] = NUMBER.grade([Task("", "", expected)], [answer])
    assert found.score == grade and len(found.detail) < 200
    without = not any(character in "0123456789" for character in answer)
    assert found.outcome == ("wrong_format" if without else "graded")


@pytest.mark.parametrize("completion", ["5", "five", ""])
@pytest.mark.parametrize("answer", ["", "Paris"])
def test_a_task_whose_answer_has_no_number_is_a_grader_error(answer: str, completion: str) -> None:
    [grade] = NUMBER.grade([Task("", "", answer)], [completion])
    assert (grade.score, grade.outcome) == (0.0, "grader_error")
    assert grade.detail == f"the task's answer {answer!r} holds no number"
