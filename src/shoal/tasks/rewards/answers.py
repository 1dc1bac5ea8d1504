"""The reward `number`: 1 if the last number of the completion is the task's answer, as in GSM8K, else 0.

If the last box holds a number, only the text in that box counts.

Invariant: a grade depends only on the task's answer and the completion. Numbers are compared as canonical text, exactly
and at any length. If the task's answer has no number, every grade is a `grader_error`.
"""

import re
from collections.abc import Sequence

from shoal.tasks.task import Grade, Task

BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*+)\}")
# A minus sign counts unless an operand precedes it: "5-3" has no -3. A comma counts between groups of three digits.
NUMBER = re.compile(
    r"((?<![\w)])[-\u2212])?\$?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+)", flags=re.ASCII
)


class Number:
    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        return [_grade(task, completion) for task, completion in zip(tasks, completions, strict=True)]

    def close(self) -> None:
        pass


def _grade(task: Task, completion: str) -> Grade:
    actual, expected = last_number(completion), last_number(task.answer)
    if expected is None:
        return Grade(0.0, "grader_error", f"the task's answer {task.answer[:40]!r} holds no number")
    if actual is None:
        return Grade(0.0, "wrong_format", "no number in the completion")
    return Grade(float(actual == expected), detail=f"{actual[:100]}, expected {task.answer[:100]}")


def last_number(text: str) -> str | None:
    r"""Return the last number of the last \boxed{}, or else the last number of the text, as canonical text.

    >>> last_number("She pays $1,250.50."), last_number(r"\\boxed{018} of 20"), last_number("none")
    ('1250.5', '18', None)
    """
    boxes = [number for box in BOXED.findall(text)[-1:] for number in NUMBER.findall(box.replace("{,}", ","))]
    numbers = boxes or NUMBER.findall(text)
    if not numbers:
        return None
    sign, digits = numbers[-1]
    # As text, because int() refuses long numbers and float() rounds them.
    whole, _, part = digits.replace(",", "").partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    value = f"{whole}.{part}" if part else whole
    return f"-{value}" if sign and value != "0" else value
