"""The multiple-choice reward: which letter a completion answers with."""

import time
from dataclasses import replace

import pytest

from shoal.tasks.rewards.choice import Choice, letter
from shoal.tasks.task import Task

TASK = Task(id="t", question="q", answer="B")


@pytest.mark.parametrize(
    "text",
    [
        "Answer: B",
        "answer:B",
        "**Answer: B**",
        "**Answer:** B",
        "Answer: $B$",
        "Answer: (B) 42 m/s",
        "The correct answer is B.",
        "The answer is **B**, because",
        "Answer: \\boxed{B}",
        "So it is \\boxed{\\text{B}}.",
        "$\\boxed{(B)}$",
        "Answer: A\nWait, no.\nAnswer: B",
        "\\boxed{A} was wrong. Answer: B",
        "Answer: A was wrong, \\boxed{B}",
        "ANSWER: B",
    ],
)
def test_forms_that_count(text: str) -> None:
    assert letter(text) == "B"
    [grade] = Choice().grade([TASK], [text])
    assert (grade.score, grade.outcome) == (1.0, "graded")


@pytest.mark.parametrize(
    "text",
    ["", "B", "I like B best", "Answer: Both are right", "The answer is I think unclear", "Answers: B", "Answer: b"],
)
def test_forms_that_are_no_answer(text: str) -> None:
    [grade] = Choice().grade([TASK], [text])
    assert (grade.score, grade.outcome) == (0.0, "wrong_format")


def test_another_letter_is_wrong_and_not_a_wrong_format() -> None:
    [grade] = Choice().grade([TASK], ["Answer: C"])
    assert (grade.score, grade.outcome, grade.detail) == (0.0, "graded", "C, expected B")


@pytest.mark.parametrize("answer", ["", "7", "BB", "b", "I"])
def test_a_task_whose_answer_is_no_letter_is_a_grader_error(answer: str) -> None:
    [grade] = Choice().grade([replace(TASK, answer=answer)], ["Answer: B"])
    assert (grade.score, grade.outcome) == (0.0, "grader_error")
    assert grade.detail == f"the task's answer {answer!r} is not a letter of a choice"


@pytest.mark.parametrize(
    "text", ["answer " * 40_000, "answer" + " " * 200_000, "answer: \\boxed{" * 20_000, "\\boxed{(" * 30_000]
)
def test_hostile_text_is_read_in_linear_time(text: str) -> None:
    began = time.process_time()
    letter(text)
    assert time.process_time() - began < 5  # a quadratic search of these takes minutes
