"""Environments, which answer the model between its turns. `conversation` decides whether a completion continues."""

from collections.abc import Callable, Mapping

from shoal.config import Config, ConfigError
from shoal.config.tasks import SandboxSection
from shoal.sandbox import SandboxError
from shoal.tasks.environments.calculator import Calculator
from shoal.tasks.environments.conversation import Conversation, responder
from shoal.tasks.environments.python import Python
from shoal.tasks.task import Environment, GradeError
from shoal.tasks.taskset import TaskSet
from shoal.tasks.user_code import SERVED, UserCode, UserEnvironment, is_user_code, program_limits

__all__ = ["Conversation", "Environment", "close", "environments_of", "responder", "try_out"]


ENVIRONMENTS: dict[str, Callable[[SandboxSection], Environment]] = {
    "calculator": lambda _: Calculator(),
    "python": lambda section: Python(program_limits(section)),
}


def environments_of(config: Config, files: Mapping[str, bytes] | None = None) -> Mapping[str, Environment]:
    """Return a run's environments, keyed by the name of the source whose tasks they serve. Raise ConfigError.

    `files`: code of user environments by file name, from the task set. Sources that name the same environment share it.
    The caller must end them with `close`.
    """
    by_name: dict[str, Environment] = {}
    by_source = {}
    for source in config.tasks.sources:
        if name := source.environment:
            by_name[name] = by_name.get(name) or _start(name, config.tasks.sandbox, files or {})
            by_source[source.label] = by_name[name]
    return by_source


def try_out(config: Config, task_set: TaskSet) -> None:
    """Start each environment; try user environments with an empty turn and with a task's answer. Raise ConfigError."""
    environments = environments_of(config, task_set.files)
    try:
        for task in task_set.samples:
            environment = environments.get(task.source)
            if not isinstance(environment, UserEnvironment):
                continue
            for turn in ("", task.answer):
                try:
                    environment.ask(task, 0, [turn])
                except (GradeError, SandboxError) as error:
                    raise ConfigError(
                        f"source {task.source}: the environment {environment.code.name} fails in a trial on task "
                        f"{task.id} with the turn {turn[:80]!r}: {error}; correct the class (it sees only "
                        f"{', '.join(SERVED)}, because workers have no other fields)"
                    ) from error
    finally:
        close(environments)


def close(environments: Mapping[str, Environment]) -> None:
    for environment in environments.values():
        environment.close()


def _start(name: str, section: SandboxSection, files: Mapping[str, bytes]) -> Environment:
    if name not in ENVIRONMENTS and not is_user_code(name):
        raise ConfigError(
            f"there is no environment {name!r}; choose one of {', '.join(sorted(ENVIRONMENTS))}, or a class of your own as "
            "file.py:Class"
        )
    try:
        if name in ENVIRONMENTS:
            return ENVIRONMENTS[name](section)
        return UserEnvironment(UserCode(name, files, section))
    except (GradeError, SandboxError) as error:
        raise ConfigError(f"the environment {name!r} cannot run on this machine: {error}") from error
