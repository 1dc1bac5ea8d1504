"""The reward `choice`: 1 if the letter that a completion answers with is the task's answer. For GPQA and the like.

The last "Answer: X" counts, the form that openai/simple-evals asks for; also with Markdown around it, in brackets, and the
last \\boxed{X}. A completion without one of these forms is a wrong format: a letter somewhere in the text is not an answer.
Invariant: a grade follows from the answer's letter and the completion alone. A task whose answer is not a letter is a
`grader_error`: no completion could be right.
"""

import re
from collections.abc import Sequence

from shoal.tasks.task import Grade, Task

MARKS = r"[*_$`\s({\[]{0,8}+"  # possessive, here and below: no input makes the search slow
LETTER = r"([A-HJ])(?![A-Za-z'’])"  # not "I"; as many as any public set has choices
BEFORE = rf"\banswer\b{MARKS}(?:is\b)?+{MARKS}:?+{MARKS}(?:\\(?:boxed|text|mathbf|mathrm)\{{{MARKS}){{0,3}}+"
ANSWER = re.compile(rf"(?i:{BEFORE}){LETTER}")
BOXED = re.compile(rf"\\boxed\{{{MARKS}(?:\\(?:text|mathbf|mathrm)\{{)?+{MARKS}{LETTER}")


class Choice:
    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        return [_grade(task, completion) for task, completion in zip(tasks, completions, strict=True)]

    def close(self) -> None:
        pass


def letter(completion: str) -> str | None:
    r"""The letter that the completion ends up with.

    >>> letter("Answer: A ... no.\n**Answer: $C$**"), letter(r"so \boxed{\text{B}}"), letter("A or B")
    ('C', 'B', None)
    """
    found = [(match.start(1), match[1]) for match in (*ANSWER.finditer(completion), *BOXED.finditer(completion))]
    return max(found)[1] if found else None


def _grade(task: Task, completion: str) -> Grade:
    found, expected = letter(completion), task.answer.strip()
    if not re.fullmatch(LETTER, expected):
        return Grade(0.0, "grader_error", f"the task's answer {expected[:40]!r} is not a letter of a choice")
    if found is None:
        return Grade(0.0, "wrong_format", "no line of the form Answer: LETTER")
    return Grade(float(found == expected), detail=f"{found}, expected {expected}")
