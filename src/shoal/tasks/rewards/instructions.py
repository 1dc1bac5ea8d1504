"""The reward `instructions`: 1 if a completion follows all instructions of an IFEval task, else 0 (Zhou et al. 2023).

The grader is that of EleutherAI's lm-evaluation-harness, Google's code with its faults mended, so that scores compare with
published ones. The score is its prompt-level strict accuracy; `parts` also holds the loose one.
Invariant: each completion is checked in a child process of its own (`inside/ifeval.py`) under a limit on CPU time,
because the library searches with regular expressions that some texts make slow. A check that passes the limit is a
`grader_error`.
Needs the extra `evals`. One instruction (number of sentences) needs NLTK's data `punkt_tab`, which the
library asks for over the network at its import.
"""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.errors import ShoalError
from shoal.sandbox import Budget
from shoal.tasks.inside import Grader, source
from shoal.tasks.task import Grade, Task

NEEDS = ("lm_eval", "langdetect")
CPU_S = 10.0
MEMORY_BYTES = 1 << 30


class MissingExtraError(ShoalError):
    """A package that is not installed; the message names the extra that brings it."""


class Instructions:
    """Its process starts with the first completion. Use `close` at the end."""

    def __init__(self, budget: Budget | None = None, *, cpu_s: float = CPU_S) -> None:
        self.grader = Grader(
            "instructions", source("ifeval"), "check", cpu_s=cpu_s, memory_bytes=MEMORY_BYTES, budget=budget
        )

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        """Raises MissingExtraError, GraderStartError."""
        _check_installed()
        grades: dict[int, Grade] = {}
        asked: dict[int, Any] = {}
        for n, (task, completion) in enumerate(zip(tasks, completions, strict=True)):
            try:
                metadata = json.loads(task.metadata)
            except (ValueError, RecursionError) as error:
                grades[n] = Grade(0.0, "grader_error", f"the metadata of task {task.id} is not JSON: {error}")
                continue
            asked[n] = {"metadata": metadata, "prompt": task.question, "completion": completion}
        if asked:
            checked = map(_explained, self.grader.grades(list(asked.values()), _graded))
            grades.update(zip(asked, checked, strict=True))
        return [grades[n] for n in range(len(tasks))]

    def close(self) -> None:
        self.grader.close()


def _explained(grade: Grade) -> Grade:
    """Return it with the remedy where NLTK's data are missing."""
    if grade.outcome != "grader_error" or "punkt_tab" not in grade.detail:
        return grade
    return replace(grade, detail="NLTK's data are missing: python -m nltk.downloader punkt_tab")


def _check_installed() -> None:
    for name in NEEDS:
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError(
                f"IFEval is graded by lm-eval, which is not installed ({name}): pip install 'shoal[evals]'"
            )


def _graded(result: dict[str, Any], repeatable: bool) -> Grade:
    strict, loose = float(result["strict"]), float(result["loose"])
    detail = f"not followed: {', '.join(result['broken'])}" if result["broken"] else "all followed"
    return Grade(strict, detail=detail, parts={"strict": strict, "loose": loose}, repeatable=repeatable)
