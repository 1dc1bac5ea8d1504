"""Environments: what answers the model between its turns, for tasks in several turns.

interface      what an environment is                    calculator   calc(12*7) is answered 84
conversation   when turns continue, and with which tokens   template     text to tokens, by the model's chat template
python         runs the model's programs                 plain        which programs print the same everywhere
"""

from collections.abc import Callable, Mapping

from shoal.config import Config, ConfigError
from shoal.config.tasks import SandboxSection
from shoal.sandbox import SandboxError, interpreter
from shoal.tasks.environments.calculator import Calculator
from shoal.tasks.environments.conversation import Conversation, responder
from shoal.tasks.environments.interface import Environment
from shoal.tasks.environments.python import Python
from shoal.tasks.rewards.graders import GradeError, limits_of, tier_of

__all__ = ["Conversation", "Environment", "close", "environments_of", "interpreter", "responder"]


def _python(section: SandboxSection) -> Python:
    try:
        return Python(limits_of(section), tier_of(section, "environment python"))
    except (GradeError, SandboxError) as error:
        raise ConfigError(f"the environment 'python' cannot run programs on this machine: {error}") from error


ENVIRONMENTS: dict[str, Callable[[SandboxSection], Environment]] = {
    "calculator": lambda _: Calculator(),
    "python": _python,
}


def environments_of(config: Config) -> Mapping[str, Environment]:
    """The environments of a run by the name of the source whose tasks they answer. Raises ConfigError.

    Workers are not trusted, so a validator must be able to compute every answer again. Sources that name the same one share
    it. The caller ends them with `close`.
    """
    made: dict[str, Environment] = {}
    found = {}
    for source, name in _named(config).items():
        if name not in ENVIRONMENTS:
            raise ConfigError(f"there is no environment {name!r}; choose one of {', '.join(sorted(ENVIRONMENTS))}")
        environment = made.get(name) or ENVIRONMENTS[name](config.tasks.sandbox)
        made[name] = environment
        if not environment.deterministic:
            raise ConfigError(
                f"the environment {name!r} is not deterministic, so no validator can tell whether an untrusted worker "
                "reports its answers: use it for evaluation only, or choose another for this run"
            )
        found[source] = environment
    return found


def close(environments: Mapping[str, Environment]) -> None:
    for environment in environments.values():
        environment.close()


def _named(config: Config) -> dict[str, str]:
    """The name of each source's environment, for sources that have one."""
    return {source.label: source.environment for source in config.tasks.sources if source.environment}
