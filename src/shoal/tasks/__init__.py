"""What models are asked and how answers are graded.

A task set is a fixed list of training tasks and a disjoint list of held-out ones, the same on every machine, so that a
task's index says everything about it. Left out here: sandboxed code tasks.
"""

from typing import Protocol

from shoal.config.recipe import TaskSection
from shoal.tasks.arithmetic import Arithmetic, Task
from shoal.tasks.gsm8k import Gsm8k

__all__ = ["Task", "TaskSet", "load"]


class TaskSet(Protocol):
    """Two disjoint lists of tasks, and the grade of an answer in [0, 1]."""

    train: list[Task]
    heldout: list[Task]

    def grade(self, task: Task, answer: str) -> float: ...


def load(config: TaskSection) -> TaskSet:
    """The task set of a config. Raises ValueError where it cannot be read or too few tasks are left to train on."""
    return Gsm8k(config) if config.kind == "gsm8k" else Arithmetic(config)
