"""User rewards and environments: functions and classes in a file of the task set, for example `"my_rewards.py:exact"`.

Invariants: whatever the user's code does, each completion gets a grade and each turn gets an answer, in bounded time.
If a reward fails, the grade is a `grader_error` with the error's text. If worker and validator get different answers
from an environment, the submission is rejected as `unrepeatable` and nobody is slashed, because the class may read a
clock or come near a limit. The code runs in the sandbox, in a fresh process for each call, because a machine need not
trust the author of a run. If the node's operator sets SHOAL_TRUST_RUN=1, the process of each call is forked from an
unsandboxed process that has loaded the file and may import installed packages.
Left out: code in several files; environment state between calls.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.config.tasks import SandboxSection
from shoal.sandbox import Budget, CallResult, ProgramLimits, SandboxError
from shoal.tasks.inside import Grader, source
from shoal.tasks.task import TRUST, Environment, Grade, GradeError, Task, trusted

TRUSTED = "trusted"  # tier of scores computed outside the sandbox; two machines need not agree on them
WAIT_S = 10.0  # wall time beyond the CPU limit, for a busy machine and for code that sleeps
SERVED = ("question", "source", "metadata")  # fields that an environment sees, because workers have no others
FIELDS = (*SERVED, "id", "answer", "tests")  # fields that a reward sees
MAX_ANSWER = 10_000  # characters of an environment's answer; the rest is cut off
FAILED = "error: the environment failed"

log = logging.getLogger(__name__)


def is_user_code(name: str) -> bool:
    return ".py:" in name


def file_name(name: str) -> str:
    """Return the name of the file of a user reward or environment in the task set."""
    return Path(name.rpartition(":")[0]).name


def program_limits(section: SandboxSection) -> ProgramLimits:
    return ProgramLimits(wall_s=section.cpu_s + WAIT_S, cpu_s=section.cpu_s, memory_bytes=section.memory_bytes)


class UserCode(Grader):
    """The function or class named "file.py:NAME". See `inside/user_code.py` for its arguments.

    `files`: code by file name, from the task set. Raise GradeError if `files` lacks the file, SandboxError if no
    sandbox works here.
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
        path, _, function = name.rpartition(":")
        if file_name(name) not in files:
            raise GradeError(f"the task set does not hold {file_name(name)}; build the set again")
        to_load = [path, files[file_name(name)].decode(errors="replace"), function]
        text, limits = source("user_code"), program_limits(section)
        self.to_load = None if trusted() else to_load
        if self.to_load is None:
            load = f"import sys; sys.path.insert(0, ''); load(*{to_load!r})"  # may import modules of the current folder
            super().__init__(name, text, "answer", limits, size=size, prepare=load, budget=budget)
            self.reported_tier = TRUSTED
        else:
            super().__init__(name, text, "answer", limits, tier=None, size=size, budget=budget)
            self.reported_tier = self.sandbox.tier

    def calls(self, values: Sequence[Any]) -> list[CallResult]:
        return super().calls([[self.to_load, value] for value in values])

    def failure(self, call: CallResult) -> str:
        hint = " (tasks.sandbox.cpu_s)" if call.ending == "timeout" else ""
        if call.detail.startswith(("ModuleNotFoundError", "ImportError")) and self.reported_tier != TRUSTED:
            hint = (
                "; the sandbox has only Python's standard library: to import other installed packages, set "
                f"{TRUST}=1 on every machine, if its owner trusts the author of this run"
            )
        return super().failure(call) + hint


def _fields(task: Task, names: Sequence[str]) -> dict[str, str]:
    """Return the fields of a task that are passed to user code."""
    return {name: getattr(task, name) for name in names}


class UserReward:
    """A user's function as a reward."""

    def __init__(self, code: UserCode) -> None:
        self.code = code

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        """Return one grade per completion. Raise SandboxError if this machine fails."""
        calls = [[_fields(task, FIELDS), completion] for task, completion in zip(tasks, completions, strict=True)]
        return self.code.grades(calls, _score)

    def close(self) -> None:
        self.code.close()


def _score(score: Any) -> Grade:
    if type(score) is not float:
        return Grade(0.0, "grader_error", "its process did not return a score", repeatable=False)
    return Grade(score).in_range()


class UserEnvironment(Environment):
    """A user's class as an environment. Raise GradeError if the file fails, SandboxError if this machine fails."""

    repeatable = False  # the class may read a clock

    def __init__(self, code: UserCode) -> None:
        self.code, self.logged = code, ""
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
            if str(error) != self.logged:  # log an error once
                self.logged = str(error)
                log.warning("environment %s: %s; the model gets %r", self.code.name, error, FAILED)
            return FAILED

    def ask(self, task: Task, seed: int, turns: Sequence[str]) -> str | None:
        """Call the user's `respond`. Raise GradeError if the class fails, SandboxError if this machine fails."""
        text = self._value([_fields(task, SERVED), seed, list(turns)])
        if text is None:
            return None
        if not isinstance(text, str):
            raise GradeError("its process did not return text or None")
        text = text.encode(errors="replace").decode()
        return text if len(text) <= MAX_ANSWER else f"{text[:MAX_ANSWER]}..."

    def set_budget(self, budget: Budget) -> None:
        self.code.sandbox.budget = budget

    def close(self) -> None:
        self.code.close()

    def _value(self, value: Any) -> Any:
        [call] = self.code.calls([value])
        if call.ending != "answered":
            raise GradeError(self.code.failure(call))
        return call.value
