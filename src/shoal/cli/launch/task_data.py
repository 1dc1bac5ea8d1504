"""Builds a pool's task set in its coordinator's folder, before the coordinator serves it.

Invariant: a pool's task set never changes: another set for the same folder is refused. torch is not imported.
Called by `shoal run` (in the child that prepares), `shoal pool init` and `shoal coordinator`.
"""

from pathlib import Path

from shoal.config import Config, ConfigError
from shoal.tasks import TasksNotFoundError
from shoal.tasks.compiling import compile_tasks, read_built

FOLDER = "tasks"  # in the coordinator's folder


def build_tasks(config: Config, folder: Path) -> tuple[Config, list[str]]:
    """The config with `tasks.digest`, and what became of each source's rows, for people. Raises ConfigError."""
    before = read_built(folder)
    section = config.tasks
    if before and not section.digest:
        section = section.model_copy(update={"digest": before.digest})
    try:
        built = compile_tasks(section, folder)
    except TasksNotFoundError as error:
        raise ConfigError(str(error)) from error
    section = section.model_copy(update={"digest": built.digest})
    return config.model_copy(update={"tasks": section}), built.notes
