"""Tasks: questions for models, and rewards for their answers.

sources/, compiling, taskset   rows to tasks on disk         task, prompt     one task; text to tokens and back
derive                         which tasks a submission has  budget           length targets
rewards/, environments/        scores; multi-turn answers    own, libraries   user code; other libraries
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
    weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True)  # every view of the tasks references the store
    built = compile_tasks(section, folder)
    return TaskSet(section, built.digest, store, built.notes)


def join(section: TaskSection, folder: Path, fetch: Fetch) -> TaskSet:
    """Return the task set named by `section.digest`, stored in `folder` and fetched by hash on demand.

    Raises TasksNotFoundError, and what `fetch` raises.
    """
    if not section.digest:
        raise TasksNotFoundError("the run's config names no task set: start its coordinator with this version of Shoal")
    return TaskSet(section, section.digest, TaskStore(folder, fetch))
