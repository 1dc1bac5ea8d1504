"""Grades completions of any task of a task set, each with its source's reward.

Invariant: worker, validator, evaluator and the tools grade through this, so the same completion gets the same score.
Rewards start on first use and end with `close`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from shoal.config.recipe import SandboxSection, SourceSection, TaskSection
from shoal.config.rewards import is_own
from shoal.errors import ShoalError
from shoal.sandbox import Limits, SandboxError
from shoal.tasks.rewards.code import Code
from shoal.tasks.rewards.number import Number
from shoal.tasks.rewards.own import Own
from shoal.tasks.rewards.weighted import combine
from shoal.tasks.task import Grade, Reward, Task

DEFAULT = "number"
REWARDS: dict[str, Callable[[], Reward]] = {"number": Number}
SANDBOXED: dict[str, Callable[[Limits, str | None], Reward]] = {
    "code": Code,
    "code_fraction": lambda limits, tier: Code(limits, tier, fraction=True),
}
TRUST = "SHOAL_TRUST_RUN"  # set to 1 by a person who trusts the author of the run with this machine


class GradeError(ShoalError):
    """A reward that cannot start, or breaks its contract; the message names it."""


class Graders:
    """Use as a context manager, or call `close`."""

    def __init__(self, section: TaskSection, files: Mapping[str, str] | None = None) -> None:
        """`files`: source of rewards of one's own, in place of the config's. Raises GradeError for an unknown one."""
        self.section = section
        self.files = section.reward_files if files is None else files
        self.rewards: dict[str, Reward] = {}  # by name
        for source in section.sources:
            for name in weights_of(source):
                self._check(source, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for reward in self.rewards.values():
            reward.close()
        self.rewards.clear()

    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        """One grade per completion, in order. Raises GradeError for a score outside of [0, 1]."""
        grades: dict[int, Grade] = {}
        for label in dict.fromkeys(task.source for task in tasks):
            of_source = [n for n, task in enumerate(tasks) if task.source == label]
            found = self._grade(
                self.section.source(label), [tasks[n] for n in of_source], [completions[n] for n in of_source]
            )
            grades.update(zip(of_source, found, strict=True))
        for n, task in enumerate(tasks):
            if not 0 <= grades[n].score <= 1:  # not for NaN either
                raise GradeError(f"the reward gives {grades[n].score} for task {task.id}; scores must be within [0, 1]")
        return [grades[n] for n in range(len(tasks))]

    def _grade(self, source: SourceSection, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        weights = weights_of(source)
        found = {name: self._reward(name).grade(tasks, completions) for name in weights}
        if not isinstance(source.reward, dict):
            return next(iter(found.values()))
        return [combine({name: found[name][n] for name in weights}, weights) for n in range(len(tasks))]

    def _reward(self, name: str) -> Reward:
        if name not in self.rewards:
            self.rewards[name] = self._start(name)
        return self.rewards[name]

    def _start(self, name: str) -> Reward:
        if name in REWARDS:
            return REWARDS[name]()
        sandbox, trusted = self.section.sandbox, os.environ.get(TRUST) == "1"
        if sandbox.tier == "rlimits" and not trusted:
            raise GradeError(
                f'reward {name}: tasks.sandbox.tier = "rlimits" protects nothing but memory and time on this machine; set '
                f"{TRUST}=1 here if you trust the author of this run, or use another tier"
            )
        tier = None if sandbox.tier == "auto" else sandbox.tier
        try:
            if is_own(name):
                return Own(name, self.files[name.rpartition(":")[0]], limits_of(sandbox), tier, trusted=trusted)
            return SANDBOXED[name](limits_of(sandbox), tier)
        except SandboxError as error:
            raise GradeError(f"reward {name} needs a sandbox: {error}") from error

    def _check(self, source: SourceSection, name: str) -> None:
        if is_own(name):
            file = name.rpartition(":")[0]
            if file not in self.files:
                raise GradeError(
                    f"source {source.label}: the run does not carry {file}; start it again from its config"
                )
        elif name not in REWARDS and name not in SANDBOXED:
            known = ", ".join([*REWARDS, *SANDBOXED])
            raise GradeError(
                f"source {source.label}: no reward {name!r}; there are {known}, or a function as file.py:name"
            )


def weights_of(source: SourceSection) -> dict[str, float]:
    """A source's rewards by name, with their weights."""
    return source.reward if isinstance(source.reward, dict) else {source.reward or DEFAULT: 1.0}


def limits_of(section: SandboxSection) -> Limits:
    return Limits(wall_s=section.wall_s, cpu_s=section.cpu_s, memory_bytes=section.memory_bytes)
