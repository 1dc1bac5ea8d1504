"""The math reward: 1 if the final answer of a completion equals the gold answer symbolically, else 0.

Invariant: a grade follows from the gold answer and the last 10,000 characters of the completion. Each comparison runs in a
child process of its own under a limit on CPU time (`killable.py`). So no answer hangs or kills a run, and load changes no
score.
Three outcomes stay apart: graded; wrong_format, where the completion has no final answer (`final_answer.py`); grader_error,
where the limit passed, the child died or the library raised.
Called through `graders`. Rules of equality: `equality.py`. Left out: partial credit, proofs, text that means the same.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.sandbox import Budget
from shoal.tasks.rewards.killable import Killable
from shoal.tasks.rewards.killable.pool import grade_of
from shoal.tasks.rewards.math.final_answer import final_answer, tidy
from shoal.tasks.task import Grade, Task

EQUALITY = Path(__file__).with_name("equality.py")
CPU_S = 1.0
MEMORY_BYTES = 512 << 20
MAX_GOLD = 1_000  # characters that `equality` reads
UNCLOSED = re.compile(r"^\\+boxed\s*\{(?!.*\}\s*$)", re.DOTALL)  # of a gold answer that was cut off
INTEGER = re.compile(r"([-\u2212]?)\$?(\d{1,3}(?:,\d{3})+|\d+)(?:\.0*)?", re.ASCII)


class Math:
    """Its processes start with the first comparison that needs one. Use as a context manager, or call `close`."""

    def __init__(self, budget: Budget | None = None, *, cpu_s: float = CPU_S, size: int = 1) -> None:
        self.pool = Killable(EQUALITY, "judge", size=size, cpu_s=cpu_s, memory_bytes=MEMORY_BYTES, budget=budget)

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        answers = [final_answer(completion) for completion in completions]
        pairs = [(_gold(task), answer or "") for task, answer in zip(tasks, answers, strict=True)]
        grades = {pair: grade for pair in set(pairs) if (grade := _at_sight(*pair)) is not None}
        asked = [pair for pair in dict.fromkeys(pairs) if pair not in grades]  # the same answer once
        if asked:
            results = self.pool.run([{"gold": gold, "answer": answer} for gold, answer in asked])
            grades.update(zip(asked, (grade_of(result, self.pool, _answered) for result in results), strict=True))
        return [grades[pair] for pair in pairs]

    def close(self) -> None:
        self.pool.close()


def _answered(value: dict[str, Any], repeatable: bool) -> Grade:
    return Grade(float(value["equal"]), detail=value["detail"], repeatable=repeatable)


def _gold(task: Task) -> str:
    worked = "\\boxed" in task.answer or len(task.answer) > MAX_GOLD  # a whole solution
    found = final_answer(task.answer) if worked else None
    return found or tidy(UNCLOSED.sub("", task.answer.removeprefix("####")))


def _at_sight(gold: str, answer: str) -> Grade | None:
    """The grade where no comparison is needed: no answer, the same text, two whole numbers."""
    if not gold:
        return Grade(0.0, "grader_error", "the task has no gold answer")
    if not answer:
        return Grade(0.0, "wrong_format", "no final answer in the completion")
    if gold == answer:
        return Grade(1.0, detail="same text")
    whole = [_integer(gold), _integer(answer)]
    return None if None in whole else Grade(float(whole[0] == whole[1]))


def _integer(text: str) -> str | None:
    """Canonical digits: int() refuses long ones."""
    found = INTEGER.fullmatch(text)
    if found is None:
        return None
    digits = found[2].replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if found[1] and digits != "0" else digits
