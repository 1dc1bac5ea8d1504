"""Tasks of the libraries `reasoning_gym` and `verifiers`, scored by the libraries' own rewards.

Each library is an extra of the package, and has a file in `inside/` with `rows(options)`, `prepare(setting)` and
`score(value)`, which run in child processes.
Invariants: rows depend only on the options and on the versions of library and environment. Each row's metadata records
options and versions, so the digest of the task set covers them. A completion is scored in a child process under limits,
so it cannot hang or kill the caller. Every grade is the library's own score, at most 1, or a grader error.
The library verifiers may run in another Python interpreter, which SHOAL_VERIFIERS_PYTHON names. A machine loads only
the verifiers environments that SHOAL_VERIFIERS_ENVIRONMENTS lists, so a run's author cannot choose the code.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.sandbox import Budget, ProgramLimits
from shoal.tasks.inside import Grader, source
from shoal.tasks.rewards.answers import visible
from shoal.tasks.task import TRUST, Grade, GradeError, Task, TasksNotFoundError, trusted

FILES = {"reasoning_gym": source("gym"), "verifiers": source("tasksets")}  # by library
LISTING = ProgramLimits(wall_s=1800.0, cpu_s=math.inf, memory_bytes=1 << 40, output_bytes=4 << 30)
SCORING = ProgramLimits(wall_s=60.0, cpu_s=10.0, memory_bytes=1 << 30)  # the slowest known score takes 3 s of CPU time
MAX_COMPLETION = 20_000  # characters; of a longer completion, only the end is scored
PYTHON = "SHOAL_VERIFIERS_PYTHON"
ENVIRONMENTS = "SHOAL_VERIFIERS_ENVIRONMENTS"  # names, comma-separated


def check_allowed(library: str, setting: Mapping[str, Any]) -> None:
    """Raise TasksNotFoundError if this machine may not load the verifiers environment named in `setting`."""
    allowed = {listed.strip() for listed in os.environ.get(ENVIRONMENTS, "").split(",")} - {""}
    if library != "verifiers" or trusted() or (name := setting.get("environment")) in allowed:
        return
    raise TasksNotFoundError(
        f"this run's tasks need the verifiers environment {name!r}, whose code would run here as your user; this machine "
        f"allows {', '.join(sorted(allowed)) or 'none'}. If you trust it, set {ENVIRONMENTS}={name} ({TRUST}=1 allows all)"
    )


def rows(library: str, options: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return every task as a row with question, answer, metadata and `library` as its reward. Raise TasksNotFoundError."""
    check_allowed(library, options)
    grader = _start(library, "rows", LISTING)
    try:
        [call] = grader.calls([dict(options)])
    except GradeError as error:
        extra = f"; pip install 'shoal[{library.replace('_', '-')}]'" if "No module named" in str(error) else ""
        raise TasksNotFoundError(f"generator {library}: {error}{extra}") from error
    finally:
        grader.close()
    if call.ending != "answered":
        raise TasksNotFoundError(f"generator {library}: {grader.failure(call).removeprefix('ValueError: ')}")
    return [{"reward": library} | row for row in call.value]


class LibraryReward:
    """Scores completions with the library's own reward. Its processes start with the first completion."""

    def __init__(self, library: str, budget: Budget | None = None) -> None:
        self.library, self.budget = library, budget
        self.graders: dict[str, Grader] = {}  # by setting, which all tasks of a source share

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        """Return one grade per completion. Raise TasksNotFoundError, GradeError or SandboxError."""
        grades: dict[int, Grade] = {}
        by_setting: dict[str, list[int]] = {}
        metadata = [json.loads(task.metadata or "{}") for task in tasks]
        for n, task in enumerate(tasks):
            if metadata[n].get("generator") == self.library:
                by_setting.setdefault(json.dumps(metadata[n]["setting"]), []).append(n)
            else:
                grades[n] = Grade(0.0, "grader_error", f"task {task.id} is not from generator {self.library}")
        for setting, numbers in by_setting.items():
            texts = [completion[-MAX_COMPLETION:] for completion in completions]
            if self.library == "reasoning_gym":  # an environment of verifiers may score thoughts
                texts = list(map(visible, texts))
            values = [metadata[n] | {"question": tasks[n].question, "completion": texts[n]} for n in numbers]
            graded = self._grader(setting).grades(values, lambda value: Grade(**value))
            grades.update(zip(numbers, graded, strict=True))
        return [grades[n] for n in range(len(tasks))]

    def close(self) -> None:
        for grader in self.graders.values():
            grader.close()
        self.graders.clear()

    def _grader(self, setting: str) -> Grader:
        if setting not in self.graders:
            check_allowed(self.library, json.loads(setting))
            self.graders[setting] = _start(self.library, "score", SCORING, f"prepare({setting!r})", self.budget)
        return self.graders[setting]


def _start(
    library: str, function: str, limits: ProgramLimits, prepare: str = "", budget: Budget | None = None
) -> Grader:
    python = os.environ.get(PYTHON) if library == "verifiers" else None
    grader = Grader(library, FILES[library], function, limits, prepare=prepare, python=python or None, budget=budget)
    if library == "verifiers":
        grader.reported_tier = "trusted"  # its rewards may call services, so two machines need not agree on a score
    return grader
