"""Other libraries' tasks as sources, with the libraries' own rewards: `reasoning_gym` and `verifiers`, each an extra.

Each has a file in `inside/` with `rows(options)`, `prepare(setting)` and `score(value)`, which run in processes of
their own.
Invariants: rows follow from the options and the versions of library and environment. Those are in each row's metadata
and so in the digest of the task set. A completion is scored in a child under limits, so it can hang or kill nothing. A
score is the library's, or a grader error.

verifiers and its hundred packages may live in an environment of their own: SHOAL_VERIFIERS_PYTHON names its
interpreter. It is no option of the config, because it differs between machines and no run's author may choose what a
machine executes. For the same reason a machine loads only the environments that SHOAL_VERIFIERS_ENVIRONMENTS lists: to
load one is to import a module.
Left out: isolation; a machine that installs a library trusts its code.
"""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.sandbox import Budget
from shoal.tasks.inside import Grader, GraderStartError, source
from shoal.tasks.task import TRUST, Grade, Task, TasksNotFoundError, trusted

LISTING_S = 1800.0
LISTED_BYTES = 4 << 30
CPU_S = 10.0  # the slowest known: 3 s, reasoning-gym's rubiks_cube for an answer that is not a sequence of moves
MEMORY_BYTES = 1 << 30
CONSIDERED = 20_000  # last characters of a completion
PYTHON = "SHOAL_VERIFIERS_PYTHON"
ENVIRONMENTS = "SHOAL_VERIFIERS_ENVIRONMENTS"  # names with commas between


class NotAllowedError(TasksNotFoundError):
    """The run wants an environment of verifiers that this machine's owner has not listed."""


@dataclass(frozen=True)
class Library:
    """Where a library's processes come from."""

    name: str  # of the generator, the reward and the module
    text: str  # of the file in `inside`
    python: str = ""  # environment variable that names its interpreter
    limited: bool = False  # to what `check_allowed` allows

    def grader(self, function: str, **settings: Any) -> Grader:
        python = os.environ.get(self.python) or sys.executable
        return Grader(self.name, self.text, function, python=python, **settings)


REASONING_GYM = Library("reasoning_gym", source("gym"))
VERIFIERS = Library("verifiers", source("tasksets"), PYTHON, limited=True)


def reasoning_gym(options: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return `size` entries of a `dataset` from a `seed`, with the data set's own options. Raises TasksNotFoundError.

    The library draws some questions more than once; each is listed once.
    """
    listed: dict[str, dict[str, str]] = {}
    for row in rows(REASONING_GYM, options):
        listed.setdefault(row["question"], row)
    return list(listed.values())


def verifiers(options: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the tasks of an installed `environment`, at most `size`, under its `config`.

    Raises TasksNotFoundError, NotAllowedError.
    """
    return rows(VERIFIERS, options)


def check_allowed(setting: Mapping[str, Any]) -> None:
    """Check that this machine may load the environment of these options, or of a task. Raises NotAllowedError."""
    name = setting.get("environment")
    allowed = {listed.strip() for listed in os.environ.get(ENVIRONMENTS, "").split(",")} - {""}
    if trusted() or name in allowed:
        return
    raise NotAllowedError(
        f"this run's tasks need the verifiers environment {name!r}, which is code that this machine would run as you; "
        f"it allows {', '.join(sorted(allowed)) or 'none'}. If you trust it, set {ENVIRONMENTS}={name} "
        f"({TRUST}=1 allows all)"
    )


def rows(library: Library, options: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return every task as a row: question, answer, metadata, and the library as its reward. Raises TasksNotFoundError."""
    if library.limited:
        check_allowed(options)
    unlimited = {"cpu_s": math.inf, "memory_bytes": LISTED_BYTES << 8, "output_bytes": LISTED_BYTES}
    grader = library.grader("rows", wall_s=LISTING_S, arguments=None, **unlimited)
    try:
        [call] = grader.calls([dict(options)])
    except GraderStartError as error:
        if f"No module named '{library.name}'" not in str(error):
            raise TasksNotFoundError(f"generator {library.name}: {error}") from error
        raise TasksNotFoundError(
            f"generator {library.name} needs a library that its Python does not have: "
            f"pip install 'shoal[{library.name.replace('_', '-')}]'"
        ) from error
    finally:
        grader.close()
    if call.ending == "answered":
        return [{"reward": library.name} | row for row in call.value]
    if call.ending == "timeout":
        raise TasksNotFoundError(
            f"generator {library.name} is not ready after {LISTING_S:.0f} s; ask for fewer tasks with options.size"
        )
    refused = call.detail.startswith("RefusedError: ")
    reason = call.detail.removeprefix("RefusedError: ") if refused else f"the library raises {call.detail}"
    raise TasksNotFoundError(f"generator {library.name}: {reason if call.ending == 'raised' else call.detail}")


class LibraryReward:
    """The reward of a library's tasks: what the library gives. Its processes start with the first completion."""

    def __init__(self, library: Library, budget: Budget | None = None, *, cpu_s: float = CPU_S) -> None:
        self.library, self.budget, self.cpu_s = library, budget, cpu_s
        self.graders: dict[str, Grader] = {}  # by setting; all tasks of a source share one

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        """Raises NotAllowedError, GraderStartError, SandboxError."""
        grades: dict[int, Grade] = {}
        by_setting: dict[str, list[int]] = {}
        metadata = [json.loads(task.metadata or "{}") for task in tasks]
        for n, (task, known) in enumerate(zip(tasks, metadata, strict=True)):
            if known.get("generator") == self.library.name:
                by_setting.setdefault(json.dumps(known["setting"]), []).append(n)
            else:
                text = f"task {task.id} is not from generator {self.library.name}, whose reward this is"
                grades[n] = Grade(0.0, "grader_error", text)
        for setting, alike in by_setting.items():
            values = [
                metadata[n] | {"question": tasks[n].question, "completion": completions[n][-CONSIDERED:]} for n in alike
            ]
            grades.update(zip(alike, self._grader(setting).grades(values, _answered), strict=True))
        return [grades[n] for n in range(len(tasks))]

    def close(self) -> None:
        for grader in self.graders.values():
            grader.close()
        self.graders.clear()

    def _grader(self, setting: str) -> Grader:
        if setting not in self.graders:
            if self.library.limited:
                check_allowed(json.loads(setting))
            self.graders[setting] = self.library.grader(
                "score", cpu_s=self.cpu_s, memory_bytes=MEMORY_BYTES, arguments=[setting], budget=self.budget
            )
        return self.graders[setting]


def _answered(value: dict[str, Any], repeatable: bool) -> Grade:
    return Grade(**value, repeatable=repeatable)
