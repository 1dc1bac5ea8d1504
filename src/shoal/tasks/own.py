"""User rewards and environments: a function or class in a file that is part of the task set, `"my_rewards.py:exact"`.

Invariants: whatever the author's code does, each completion gets a grade and each turn an answer in bounded time. A
reward that fails is a `grader_error` with the error's text. An environment's answer that differs between machines is
rejected as `unrepeatable` and slashes nobody, because the class may read a clock or come near a limit. The code runs in the
sandbox, a fresh process for each call, because a machine need not trust the author of a run. If the node's operator sets
SHOAL_TRUST_RUN=1, these processes are forked from an unsandboxed one that has imported the file and may import installed
packages.
Left out: further files of the author; environment state between calls.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.config.tasks import SandboxSection
from shoal.sandbox import Budget, CallResult, ProgramLimits, SandboxError
from shoal.tasks.inside import Grader, source
from shoal.tasks.task import TRUST, Environment, Grade, GradeError, Task, trusted

TRUSTED = "trusted"  # tier of unsandboxed scores, on which two machines need not agree
WAIT_S = 10.0  # wall time beyond the CPU limit, for a busy machine and for code that sleeps
FIELDS = ("id", "question", "answer", "source", "tests", "metadata")
LONGEST_ANSWER = 10_000  # characters of an environment's answer; a longer one is cut
FAILED = "error: the environment failed"

log = logging.getLogger(__name__)


def is_own(name: str) -> bool:
    return ".py:" in name


def file_of(name: str) -> str:
    """Return the name in the task set of a user reward's or environment's file."""
    return Path(name.rpartition(":")[0]).name


def limits_of(section: SandboxSection) -> ProgramLimits:
    return ProgramLimits(wall_s=section.cpu_s + WAIT_S, cpu_s=section.cpu_s, memory_bytes=section.memory_bytes)


class AuthorCode(Grader):
    """The function or class that `name`, "file.py:NAME", names, called with [task, ...], see `inside/own.py`.

    `files` is source by file name, from the task set. Raises GradeError if the file is not there, SandboxError if there is
    no sandbox here.
    """

    def __init__(
        self,
        name: str,
        files: Mapping[str, bytes],
        section: SandboxSection,
        *,
        size: int = 1,
        budget: Budget | None = None,
    ) -> None:
        path, _, inside = name.rpartition(":")
        if file_of(name) not in files:
            raise GradeError(f"the task set does not hold {file_of(name)}; make it again")
        setup = [path, files[file_of(name)].decode(errors="replace"), inside]
        kept, text, limits = trusted(), source("own"), limits_of(section)
        if kept:
            load = f"import sys; sys.path.insert(0, ''); load(*{setup!r})"  # what lies beside the run, too
            super().__init__(name, text, "answer", limits, size=size, prepare=load, budget=budget)
        else:
            super().__init__(name, text, "answer", limits, tier=None, size=size, setup=setup, budget=budget)
        self.tier = TRUSTED if kept else self.function.sandbox.tier

    def failure(self, call: CallResult) -> str:
        imported = call.detail.startswith(("ModuleNotFoundError", "ImportError")) and self.tier != TRUSTED
        remedy = (
            "; the sandbox has Python's standard library alone: to import what else is installed, set "
            f"{TRUST}=1 on every machine, where its owner trusts the author of this run"
        )
        limited = " (tasks.sandbox.cpu_s)" if call.ending == "timeout" else ""
        return super().failure(call) + (remedy if imported else limited)


def _seen(task: Task) -> dict[str, str]:
    """Return the fields of a task that the author's code gets."""
    return {field: getattr(task, field) for field in FIELDS}


class OwnReward:
    """The author's function as a reward."""

    def __init__(self, code: AuthorCode) -> None:
        self.code = code

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        """Grade the completions. Raises SandboxError if this machine fails, which says nothing about a completion."""
        calls = [[_seen(task), completion] for task, completion in zip(tasks, completions, strict=True)]
        return self.code.grades(calls, _score)

    def close(self) -> None:
        self.code.close()


def _score(score: Any) -> Grade:
    if type(score) is not float:
        return Grade(0.0, "grader_error", "its process answers with something else than a score", repeatable=False)
    if not 0 <= score <= 1:  # not for NaN either
        return Grade(0.0, "grader_error", f"it returned {score}; scores must be within [0, 1]", repeatable=False)
    return Grade(score)


class OwnEnvironment(Environment):
    """The author's class as an environment. Raises GradeError if the file fails, SandboxError if this machine fails."""

    def __init__(self, code: AuthorCode) -> None:
        self.code, self.reported = code, ""
        try:
            if self._value(None) != "class":
                raise GradeError("it is not a class")
        except BaseException:
            self.close()
            raise

    def respond(self, task: Task, seed: int, turns: Sequence[str]) -> str | None:
        try:
            return self.ask(task, seed, turns)
        except (GradeError, SandboxError) as error:
            if str(error) != self.reported:  # log the same error once
                self.reported = str(error)
                log.warning("environment %s: %s; the model is answered %r", self.code.name, error, FAILED)
            return FAILED

    def ask(self, task: Task, seed: int, turns: Sequence[str]) -> str | None:
        """Call the author's `respond`. Raises GradeError if the class fails, SandboxError if this machine fails."""
        text = self._value([_seen(task), seed, list(turns)])
        if not isinstance(text, str | None):
            raise GradeError("its process answers with something else than text or None")
        if text is None:
            return None
        text = text.encode(errors="replace").decode()
        return text if len(text) <= LONGEST_ANSWER else f"{text[:LONGEST_ANSWER]}..."

    def tolerated(self, task: Task, seed: int, turns: Sequence[str]) -> None:
        return None

    def within(self, budget: Budget) -> None:
        self.code.function.sandbox.budget = budget

    def close(self) -> None:
        self.code.close()

    def _value(self, value: Any) -> Any:
        [call] = self.code.calls([value])
        if call.ending != "answered":
            raise GradeError(self.code.failure(call))
        return call.value
