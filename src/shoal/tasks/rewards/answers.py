"""The rewards `number` and `choice`: short answers that are compared as text.

`number` is 1 if the last number of the completion, or of its last box, is the answer, as usual for GSM8K. Numbers are
compared in a canonical form, so that none is too long or rounded.
`choice` is 1 if the letter that a completion answers with is the task's answer, for GPQA and the like. The last
"Answer: X" counts, the form that openai/simple-evals asks for; also with Markdown around it, in brackets, and the last
\\boxed{X}. A letter somewhere in the text is not an answer.

Invariant: a grade follows from the task's answer and the completion alone. A task whose answer is no number, or no
letter, is a `grader_error`: no completion could be right.
"""

import re
from collections.abc import Callable, Sequence

from shoal.tasks.task import Grade, Task

BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*+)\}")
# A minus sign counts unless an operand precedes it: "5-3" has no -3. A comma counts between groups of three digits.
NUMBER = re.compile(
    r"((?<![\w)])[-\u2212])?\$?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+)", flags=re.ASCII
)
MARKS = r"[*_$`\s({\[]{0,8}+"  # possessive, here and below: no input makes the search slow
LETTER = r"([A-HJ])(?![A-Za-z'’])"  # not "I"; as many as any public set has choices
BEFORE = rf"\banswer\b{MARKS}(?:is\b)?+{MARKS}:?+{MARKS}(?:\\(?:boxed|text|mathbf|mathrm)\{{{MARKS}){{0,3}}+"
ANSWER = re.compile(rf"(?i:{BEFORE}){LETTER}")
BOXED_LETTER = re.compile(rf"\\boxed\{{{MARKS}(?:\\(?:text|mathbf|mathrm)\{{)?+{MARKS}{LETTER}")


class ShortAnswer:
    """A reward that needs no process: `compare` grades one completion."""

    def __init__(self, compare: Callable[[Task, str], Grade]) -> None:
        self.compare = compare

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        return [self.compare(task, completion) for task, completion in zip(tasks, completions, strict=True)]

    def close(self) -> None:
        pass


def grade_number(task: Task, completion: str) -> Grade:
    actual, expected = last_number(completion), last_number(task.answer)
    if expected is None:
        return Grade(0.0, "grader_error", f"the task's answer {task.answer[:40]!r} holds no number")
    if actual is None:
        return Grade(0.0, "wrong_format", "no number in the completion")
    return Grade(float(actual == expected), detail=f"{actual[:100]}, expected {task.answer[:100]}")


def last_number(text: str) -> str | None:
    r"""Return the last number in the last \boxed{}, or else in the text, in a canonical form.

    >>> last_number("She pays $1,250.50."), last_number(r"\\boxed{018} of 20"), last_number("none")
    ('1250.5', '18', None)
    """
    boxes = [number for box in BOXED.findall(text)[-1:] for number in NUMBER.findall(box.replace("{,}", ","))]
    numbers = boxes or NUMBER.findall(text)
    if not numbers:
        return None
    sign, digits = numbers[-1]
    whole, _, part = digits.replace(",", "").partition(".")  # as text: int() refuses and float() rounds long numbers
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    value = f"{whole}.{part}" if part else whole
    return f"-{value}" if sign and value != "0" else value


def letter(completion: str) -> str | None:
    r"""Return the letter that the completion ends up with.

    >>> letter("Answer: A ... no.\n**Answer: $C$**"), letter(r"so \boxed{\text{B}}"), letter("A or B")
    ('C', 'B', None)
    """
    letters = [
        (match.start(1), match[1]) for match in (*ANSWER.finditer(completion), *BOXED_LETTER.finditer(completion))
    ]
    return max(letters)[1] if letters else None


def grade_choice(task: Task, completion: str) -> Grade:
    actual, expected = letter(completion), task.answer.strip()
    if not re.fullmatch(LETTER, expected):
        return Grade(0.0, "grader_error", f"the task's answer {expected[:40]!r} is not a letter of a choice")
    if actual is None:
        return Grade(0.0, "wrong_format", "no line of the form Answer: LETTER")
    return Grade(float(actual == expected), detail=f"{actual}, expected {expected}")
