"""Tasks: questions for models, and graders of their answers.

A task set is a fixed list of training tasks and a disjoint list of held-out tasks. Both are the same on every machine, so
an index identifies a task. Left out: sandboxed code tasks.
"""

from typing import Protocol

from shoal.config.recipe import TaskSection
from shoal.tasks.arithmetic import Arithmetic, Task
from shoal.tasks.gsm8k import Gsm8k

__all__ = ["Task", "TaskSet", "load"]


class TaskSet(Protocol):
    """Two disjoint lists of tasks, and a grader: `grade` returns a number in [0, 1] (`tasks.prompt.grade` enforces it)."""

    train: list[Task]
    heldout: list[Task]

    def grade(self, task: Task, answer: str) -> float: ...


def load(config: TaskSection) -> TaskSet:
    """The task set of a config. Raises ValueError if it cannot be read or leaves too few tasks to train on."""
    return Gsm8k(config) if config.kind == "gsm8k" else Arithmetic(config)
