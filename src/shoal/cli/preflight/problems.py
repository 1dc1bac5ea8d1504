"""What can be known before a run starts: does its config fit the model, and can its tasks be read and graded?

Invariant: nothing is started, and only what answers a question is fetched (a hub model's config.json, the hub's tasks).
torch is not imported. A port in use and a package that is missing are named by the process that needs them.
"""

from pathlib import Path

from shoal import tasks
from shoal.config import Config, ConfigError
from shoal.model import sources
from shoal.model.sources import positions
from shoal.tasks.environments import try_out
from shoal.tasks.task import GradeError
from shoal.tasks.taskset import TaskSet


def check_length(config: Config, *, fetch: bool = False) -> None:
    """Raise ConfigError if completions of `sampling.max_tokens` exceed the model's positions.

    Nothing is checked if the model is not on this machine (unless `fetch`: a hub model's config.json is downloaded).
    Raises ModelNotFoundError.
    """
    most = positions(sources.read_config(config.model.name, fetch=fetch))
    if most is not None and config.sampling.max_tokens >= most:
        raise ConfigError(
            f"sampling.max_tokens = {config.sampling.max_tokens} does not fit {config.model.name}: prompt and completion "
            f"share its {most} positions; lower sampling.max_tokens"
        )


def load_tasks(config: Config, folder: Path | None = None) -> TaskSet:
    """Return the task set, kept in `folder`, once its rewards and environments were tried. Raises ConfigError."""
    try:
        loaded = tasks.load(config.tasks, folder)
        with tasks.Graders(config.tasks, files=loaded.files) as graders:
            graders.try_out(loaded.samples)
        try_out(config, loaded)
    except (ValueError, GradeError) as error:
        raise ConfigError(str(error)) from error
    return loaded


def local_folder(name: str) -> Path | None:
    """The folder of a model that is on this machine for sure, without a look at the hub's cache; None for others."""
    if name in (sources.SMOLLM2, sources.TINY):
        return sources.smollm2_dir() if name == sources.SMOLLM2 else sources.tiny_dir()
    return sources.resolve(name) if name.startswith((".", "/", "~")) else None
