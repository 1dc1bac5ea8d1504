"""Questions for models, and rewards for their answers.

sources/         read rows from files, data sets and generators
compiling        turn the rows into tasks on disk
taskset          read the tasks from disk
task             one task, its grade, and the interfaces of rewards and environments
derive           choose the tasks of a submission
prompt, budget   prompts as tokens; length targets
rewards/         score completions
environments/    answer the model between its turns
user_code        rewards and environments written by users
libraries        tasks of other libraries
inside/          code that runs in the sandbox
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
    """Build the task set of a config in `folder` and return it.

    Without `folder`, use a temporary folder, which is deleted with the set. Raise TasksNotFoundError if a source is not
    readable or has too few tasks, or if the set's digest is not `section.digest`.
    """
    if folder is not None:
        store = TaskStore(folder)
    else:
        parent = cache_dir() / "tasks"
        parent.mkdir(parents=True, exist_ok=True)
        store = TaskStore(Path(tempfile.mkdtemp(dir=parent)))
        weakref.finalize(store, shutil.rmtree, store.folder, ignore_errors=True)  # a view references the store
    built = compile_tasks(section, store.folder)
    return TaskSet(section, built.digest, store, built.notes)


def join(section: TaskSection, folder: Path, fetch: Fetch) -> TaskSet:
    """Return the task set named by `section.digest`. Missing files are fetched into `folder` when they are needed.

    Raise TasksNotFoundError, or any error of `fetch`.
    """
    if not section.digest:
        raise TasksNotFoundError("the run's config names no task set: start its coordinator with this version of Shoal")
    return TaskSet(section, section.digest, TaskStore(folder, fetch))
