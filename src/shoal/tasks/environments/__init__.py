"""Environments: what answers the model between its turns. `conversation` says when turns continue, and with which tokens."""

from collections.abc import Callable, Mapping

from shoal.config import Config, ConfigError
from shoal.config.tasks import SandboxSection
from shoal.sandbox import SandboxError, interpreter
from shoal.tasks.environments.calculator import Calculator
from shoal.tasks.environments.conversation import Conversation, responder
from shoal.tasks.environments.python import Python
from shoal.tasks.own import AuthorCode, OwnEnvironment, is_own, limits_of
from shoal.tasks.task import Environment, GradeError
from shoal.tasks.taskset import TaskSet

__all__ = ["Conversation", "Environment", "close", "environments_of", "interpreter", "responder", "try_out"]


ENVIRONMENTS: dict[str, Callable[[SandboxSection], Environment]] = {
    "calculator": lambda _: Calculator(),
    "python": lambda section: Python(limits_of(section)),
}


def environments_of(config: Config, files: Mapping[str, bytes] | None = None) -> Mapping[str, Environment]:
    """Return the environments of a run by the name of the source whose tasks they answer. Raises ConfigError.

    `files`: the source of environments of your own, by file name, from the task set. Workers are not trusted, so a
    validator must be able to compute every answer again. Sources that name the same one share it. The caller ends them with
    `close`.
    """
    made: dict[str, Environment] = {}
    by_source = {}
    for source, name in _named(config).items():
        environment = made.get(name) or _started(name, config.tasks.sandbox, files or {})
        made[name] = by_source[source] = environment
    return by_source


def try_out(config: Config, task_set: TaskSet) -> None:
    """Start each environment, and give those of your own an empty turn and a task's answer as one. Raises ConfigError."""
    environments = environments_of(config, task_set.files)
    try:
        for task in task_set.samples:
            environment = environments.get(task.source)
            if not isinstance(environment, OwnEnvironment):
                continue
            for turn in ("", task.answer):
                try:
                    environment.ask(task, 0, [turn])
                except (GradeError, SandboxError) as error:
                    raise ConfigError(
                        f"source {task.source}: the environment {environment.code.name} fails on a trial, task {task.id} "
                        f"with the turn {turn[:80]!r}: {error}; correct the class"
                    ) from error
    finally:
        close(environments)


def close(environments: Mapping[str, Environment]) -> None:
    for environment in environments.values():
        environment.close()


def _started(name: str, section: SandboxSection, files: Mapping[str, bytes]) -> Environment:
    if name not in ENVIRONMENTS and not is_own(name):
        raise ConfigError(
            f"there is no environment {name!r}; choose one of {', '.join(sorted(ENVIRONMENTS))}, or a class of your own as "
            "file.py:Class"
        )
    try:
        if name in ENVIRONMENTS:
            return ENVIRONMENTS[name](section)
        return OwnEnvironment(AuthorCode(name, files, section))
    except (GradeError, SandboxError) as error:
        raise ConfigError(f"the environment {name!r} cannot run on this machine: {error}") from error


def _named(config: Config) -> dict[str, str]:
    """Return the name of each source's environment, for sources that have one."""
    return {source.label: source.environment for source in config.tasks.sources if source.environment}
