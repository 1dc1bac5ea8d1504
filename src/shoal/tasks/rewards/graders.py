"""Grades completions of any task of a task set, each with its source's reward.

Invariant: worker, validator, evaluator and the tools grade through this, so the same completion gets the same score.
Rewards start on first use and end with `close`.
"""

from collections.abc import Callable, Sequence
from typing import Self

from shoal.config.recipe import SourceSection, TaskSection
from shoal.errors import ShoalError
from shoal.tasks.rewards.math import Math
from shoal.tasks.rewards.number import Number
from shoal.tasks.task import Grade, Reward, Task

REWARDS: dict[str, Callable[[], Reward]] = {"number": Number, "math": Math}


class GradeError(ShoalError):
    """A reward that breaks its contract; the message names the task."""


class Graders:
    """Use as a context manager, or call `close`."""

    def __init__(self, section: TaskSection) -> None:
        self.section = section
        self.rewards: dict[str, Reward] = {}  # by source

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
        for source in dict.fromkeys(task.source for task in tasks):
            of_source = [n for n, task in enumerate(tasks) if task.source == source]
            found = self._reward(source).grade([tasks[n] for n in of_source], [completions[n] for n in of_source])
            grades.update(zip(of_source, found, strict=True))
        for n, task in enumerate(tasks):
            if not 0 <= grades[n].score <= 1:  # not for NaN either
                raise GradeError(f"the reward gives {grades[n].score} for task {task.id}; scores must be within [0, 1]")
        return [grades[n] for n in range(len(tasks))]

    def _reward(self, source: str) -> Reward:
        if source not in self.rewards:
            self.rewards[source] = make_reward(self.section.source(source))
        return self.rewards[source]


def make_reward(source: SourceSection) -> Reward:
    """The reward that a source names. Raises GradeError for an unknown one."""
    name = source.reward or "number"
    if not isinstance(name, str) or name not in REWARDS:
        raise GradeError(f"source {source.label}: no reward {name!r}; there are {', '.join(REWARDS)}")
    return REWARDS[name]()
