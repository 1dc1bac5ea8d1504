"""The generator and the reward `verifiers`: single-turn environments of the library verifiers, scored by their own rewards.

Invariant: an environment whose rewards need a judge model, a sandbox, tools or further turns is refused when it is listed.
Called through `sources` and `graders`. What runs in the library's processes: `far/environments.py`. The library and its
hundred packages may live in an environment of their own: SHOAL_VERIFIERS_PYTHON names its interpreter. It is not an option
of the config, because it differs between machines and no run's author may choose what a machine executes. For the same
reason a machine loads only the environments that SHOAL_VERIFIERS_ENVIRONMENTS lists: to load one is to import a module.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

from shoal.sandbox import Budget
from shoal.tasks.adapters.library import FAR, Library, Scored
from shoal.tasks.task import TasksNotFoundError
from shoal.tasks.trust import TRUST, trusted

PYTHON = "SHOAL_VERIFIERS_PYTHON"
ENVIRONMENTS = "SHOAL_VERIFIERS_ENVIRONMENTS"  # names with commas between


class NotAllowedError(TasksNotFoundError):
    """The run wants an environment that this machine's owner has not listed."""


def verifiers(options: Mapping[str, Any]) -> list[dict[str, str]]:
    """The tasks of an installed `environment`, at most `size`, under its `config`.

    Raises TasksNotFoundError, NotAllowedError.
    """
    return library().rows(options)


def reward(budget: Budget | None = None) -> Scored:
    return Scored(library(), budget)


def library() -> Library:
    python = os.environ.get(PYTHON) or sys.executable
    return Library("verifiers", FAR / "environments.py", "verifiers", python, check=check_allowed)


def check_allowed(setting: Mapping[str, Any]) -> None:
    """Whether this machine may load the environment of these options, or of a task. Raises NotAllowedError."""
    name = setting.get("environment")
    allowed = {listed.strip() for listed in os.environ.get(ENVIRONMENTS, "").split(",")} - {""}
    if trusted() or name in allowed:
        return
    raise NotAllowedError(
        f"this run's tasks need the verifiers environment {name!r}, which is code that this machine would run as you; "
        f"it allows {', '.join(sorted(allowed)) or 'none'}. If you trust it, set {ENVIRONMENTS}={name} "
        f"({TRUST}=1 allows all)"
    )
