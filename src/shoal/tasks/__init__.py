"""Tasks: questions for models, and rewards for their answers.

sources/, compiling, taskset   rows become tasks on disk      task, prompt            one task; text to tokens and back
derive                         the tasks of a submission      budget                  length targets
rewards/, environments/        scores; answers between turns  user_code, libraries    user code; libraries' tasks
inside/                        code that runs in the sandbox
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
    """Return the task set of a config, built from its sources in `folder`. Without `folder` the tasks are deleted with
    the set.

    Raise TasksNotFoundError if a source is not readable, has too few tasks, or does not give `section.digest`.
    """
    if folder is not None:
        store = TaskStore(folder)
    else:
        parent = cache_dir() / "tasks"
        parent.mkdir(parents=True, exist_ok=True)
        store = TaskStore(Path(tempfile.mkdtemp(dir=parent)))
        weakref.finalize(store, shutil.rmtree, store.folder, ignore_errors=True)  # every view references the store
    built = compile_tasks(section, store.folder)
    return TaskSet(section, built.digest, store, built.notes)


def join(section: TaskSection, folder: Path, fetch: Fetch) -> TaskSet:
    """Return the task set named by `section.digest`, stored in `folder` and fetched by hash when needed.

    Raise TasksNotFoundError, and what `fetch` raises.
    """
    if not section.digest:
        raise TasksNotFoundError("the run's config names no task set: start its coordinator with this version of Shoal")
    return TaskSet(section, section.digest, TaskStore(folder, fetch))
