"""Grades completions of any task of a task set, each with its source's reward, or with its own where the source names none.

Invariant: worker, validator, evaluator and the tools grade through this, so the same completion gets the same score.
Rewards start on first use and end with `close`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Self

from shoal.config.recipe import SourceSection, TaskSection
from shoal.errors import ShoalError
from shoal.tasks.rewards.choice import Choice
from shoal.tasks.rewards.instructions import Instructions
from shoal.tasks.rewards.math import Math
from shoal.tasks.rewards.number import Number
from shoal.tasks.task import Grade, Reward, Task

REWARDS: dict[str, Callable[[], Reward]] = {
    "number": Number,
    "math": Math,
    "choice": Choice,
    "instructions": Instructions,
}


class GradeError(ShoalError):
    """A reward that breaks its contract; the message names the task."""


class Graders:
    """Use as a context manager, or call `close`."""

    def __init__(self, section: TaskSection, *, files: Mapping[str, bytes] | None = None) -> None:
        self.section = section
        self.files = files or {}  # source files of rewards of one's own, by name
        self.rewards: dict[str, Reward] = {}  # by source, or by source and the tasks' own reward

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
        for source, own in dict.fromkeys((task.source, task.reward) for task in tasks):
            alike = [n for n, task in enumerate(tasks) if (task.source, task.reward) == (source, own)]
            found = self._reward(source, own).grade([tasks[n] for n in alike], [completions[n] for n in alike])
            grades.update(zip(alike, found, strict=True))
        for n, task in enumerate(tasks):
            if not 0 <= grades[n].score <= 1:  # not for NaN either
                raise GradeError(f"the reward gives {grades[n].score} for task {task.id}; scores must be within [0, 1]")
        return [grades[n] for n in range(len(tasks))]

    def _reward(self, source: str, own: str) -> Reward:
        """The reward of a source's tasks; `own` is theirs, for a source that names none."""
        section = self.section.source(source)
        key = source if section.reward or not own else f"{source}/{own}"
        if key not in self.rewards:
            self.rewards[key] = make_reward(section, own)
        return self.rewards[key]


def make_reward(source: SourceSection, own: str = "") -> Reward:
    """The reward that a source names, or else the tasks' own. Raises GradeError for an unknown one, or for none."""
    name = source.reward or own
    if not name:
        raise GradeError(f"source {source.label} names no reward, and neither does its schema; set its reward")
    if not isinstance(name, str) or name not in REWARDS:
        raise GradeError(f"source {source.label}: no reward {name!r}; there are {', '.join(REWARDS)}")
    return REWARDS[name]()
