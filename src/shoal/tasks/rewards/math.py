r"""The reward `math`: 1 if the final answer of a completion equals the gold answer as mathematics, else 0.

Invariants: a grade depends only on the gold answer and the final answer (`answers.py`). Each comparison runs in its own
child process with a limit on CPU time (`inside/equality.py`), so no answer hangs or kills a run, and load changes no
score.
Outcomes: `graded`; `wrong_format` if the completion has no final answer; `grader_error` if the gold answer alone exceeds
a limit or cannot be compared. An answer that does so is wrong.
With `literal`, a number must be written as a number: for 56088, "123*456" is wrong.
Left out: partial credit, proofs, answers that say the same in other words.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from shoal.sandbox import Budget, ProgramLimits
from shoal.tasks.inside import Grader, source
from shoal.tasks.rewards.answers import canonical, final_answer, tidy
from shoal.tasks.task import Grade, Task

EQUALITY = source("equality")
CPU_S = 1.0
WALL_S = 60.0  # long, so that load changes no score; the limit on CPU time ends a comparison first
MEMORY_BYTES = 512 << 20
MAX_GOLD = 1_000  # characters that `equality` reads
UNCLOSED = re.compile(r"^\\+boxed\s*\{(?!.*\}\s*$)", re.DOTALL)  # the open box of a gold answer that was cut off


class Math:
    """The reward `math`. Its processes start with the first comparison and end with `close`."""

    def __init__(
        self, budget: Budget | None = None, *, literal: bool = False, cpu_s: float = CPU_S, size: int = 1
    ) -> None:
        self.options = ["literal"] if literal else []
        limits = ProgramLimits(WALL_S, cpu_s, MEMORY_BYTES)
        self.grader = Grader("math", EQUALITY, "judge", limits, size=size, prepare="prepare()", budget=budget)

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        answers = [final_answer(completion) for completion in completions]
        pairs = [(_gold(task), answer or "") for task, answer in zip(tasks, answers, strict=True)]
        at_sight = {pair: _grade_at_sight(*pair) for pair in pairs}
        compared = self._compared([pair for pair, grade in at_sight.items() if grade is None])  # equal pairs once
        failed = [pair for pair, grade in compared.items() if grade.outcome == "grader_error"]
        alone = self._compared(list(dict.fromkeys((gold, "0") for gold, _ in failed)))
        for gold, answer in failed:
            by_clock = compared[gold, answer].detail.endswith(f"limit of {WALL_S:g} s")
            if alone[gold, "0"].outcome == "graded" and not by_clock:  # so the answer is at fault
                compared[gold, answer] = replace(compared[gold, answer], outcome="graded")
        return [at_sight[pair] or compared[pair] for pair in pairs]

    def _compared(self, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], Grade]:
        values = [[*pair, *self.options] for pair in pairs]
        grades = self.grader.grades(values, lambda result: Grade(float(result[0]), detail=result[1]))
        return dict(zip(pairs, grades, strict=True))

    def close(self) -> None:
        self.grader.close()


def _gold(task: Task) -> str:
    is_solution = "\\boxed" in task.answer or len(task.answer) > MAX_GOLD  # a derivation that ends with the answer
    answer = final_answer(task.answer) if is_solution else None
    return answer or tidy(UNCLOSED.sub("", task.answer.removeprefix("####")))


def _grade_at_sight(gold: str, answer: str) -> Grade | None:
    """Return the grade if an answer is missing, the texts are equal or both are whole numbers; otherwise None."""
    if not gold:
        return Grade(0.0, "grader_error", "the task has no gold answer")
    if not answer:
        return Grade(0.0, "wrong_format", "no final answer in the completion")
    numbers = [canonical(gold), canonical(answer)]
    if gold == answer or None not in numbers and numbers[0] == numbers[1]:
        return Grade(1.0, detail="same text")
    return None if None in numbers or "." in "".join(map(str, numbers)) else Grade(0.0)
