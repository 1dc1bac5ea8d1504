"""Tasks: questions for models, and rewards for their answers."""

from shoal.config.recipe import TaskSection
from shoal.tasks.rewards.graders import Graders
from shoal.tasks.task import Grade, Task, TasksNotFoundError
from shoal.tasks.taskset import TaskSet

__all__ = ["Grade", "Graders", "Task", "TaskSet", "TasksNotFoundError", "load"]


def load(section: TaskSection) -> TaskSet:
    """The task set of a config. Raises TasksNotFoundError if it cannot be read or leaves too few tasks to train on."""
    return TaskSet(section)
