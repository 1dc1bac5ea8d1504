"""Tasks: questions for models, and rewards for their answers.

sources/, compiling, taskset   rows become tasks on disk     task, prompt     one task; text to tokens and back
derive                         which tasks are drawn         budget           length targets
rewards/, environments/        scores; answers between turns own, libraries   your own; other libraries'
inside/                        what runs in the sandbox's children
"""

import shutil
import tempfile
import weakref
from pathlib import Path

from shoal.config.tasks import TaskSection
from shoal.model.sources import cache_dir
from shoal.tasks.compiling import compile_tasks
from shoal.tasks.rewards.graders import Graders, versions
from shoal.tasks.task import Grade, GradeError, Task, TasksNotFoundError
from shoal.tasks.taskset import Fetch, TaskSet, TaskStore

__all__ = ["Grade", "GradeError", "Graders", "Task", "TaskSet", "TasksNotFoundError", "join", "load", "versions"]


def load(section: TaskSection, folder: Path | None = None) -> TaskSet:
    """Return the task set of a config, built from its sources in `folder` (default: a temporary one, gone with the set).

    Raises TasksNotFoundError if a source cannot be read, leaves too few tasks, or does not give `section.digest`.
    """
    if folder is not None:
        built = compile_tasks(section, folder)
        return TaskSet(section, built.digest, TaskStore(folder), built.notes)
    parent = cache_dir() / "tasks"
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=parent))
    store = TaskStore(folder)
    weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True)  # every view of the tasks holds the store
    built = compile_tasks(section, folder)
    return TaskSet(section, built.digest, store, built.notes)


def join(section: TaskSection, folder: Path, fetch: Fetch) -> TaskSet:
    """Return the task set that `section.digest` names, kept in `folder` and fetched by hash as it is needed.

    Raises TasksNotFoundError, and what `fetch` raises.
    """
    if not section.digest:
        raise TasksNotFoundError("the run's config names no task set: start its coordinator with this version of Shoal")
    return TaskSet(section, section.digest, TaskStore(folder, fetch))
