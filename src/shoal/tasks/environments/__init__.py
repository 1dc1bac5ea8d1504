"""Environments: what answers the model between its turns, for tasks in several turns.

interface      what an environment is                    calculator   calc(12*7) is answered 84
conversation   when turns go on, and with which tokens   template     text to tokens, by the model's chat template
"""

from collections.abc import Callable, Mapping

from shoal.config import Config, ConfigError
from shoal.tasks.environments.calculator import Calculator
from shoal.tasks.environments.conversation import Conversation, responder
from shoal.tasks.environments.interface import Environment

__all__ = ["Conversation", "Environment", "environments_of", "responder"]

ENVIRONMENTS: dict[str, Callable[[], Environment]] = {"calculator": Calculator}


def environments_of(config: Config) -> Mapping[str, Environment]:
    """The environments of a run by the name of the source whose tasks they answer. Raises ConfigError.

    Workers are not trusted, so a validator must be able to compute every answer again.
    """
    found = {}
    for source, name in _named(config).items():
        if name not in ENVIRONMENTS:
            raise ConfigError(f"there is no environment {name!r}; choose one of {', '.join(sorted(ENVIRONMENTS))}")
        environment = ENVIRONMENTS[name]()
        if not environment.deterministic:
            raise ConfigError(
                f"the environment {name!r} is not deterministic, so no validator can tell whether an untrusted worker "
                "reports its answers: use it for evaluation only, or choose another for this run"
            )
        found[source] = environment
    return found


def _named(config: Config) -> dict[str, str]:
    """The name of each source's environment, for sources that have one."""
    return {source.label: source.environment for source in config.tasks.sources if source.environment}
