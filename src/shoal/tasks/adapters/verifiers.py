"""The generator and the reward `verifiers`: single-turn environments of the library verifiers, scored by their own rewards.

Invariant: an environment whose rewards need a judge model, a sandbox, tools or further turns is refused when it is listed.
Called through `sources` and `graders`. What runs in the library's processes: `far/environments.py`. The library and its
hundred packages may live in an environment of their own: SHOAL_VERIFIERS_PYTHON names its interpreter. It is no option
of the config, because it differs between machines and no run's author may choose what a machine executes.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

from shoal.tasks.adapters.library import FAR, Library, Scored

PYTHON = "SHOAL_VERIFIERS_PYTHON"


def verifiers(options: Mapping[str, Any]) -> list[dict[str, str]]:
    """The tasks of an installed `environment`, at most `size`, under its `config`. Raises TasksNotFoundError."""
    return library().rows(options)


def reward() -> Scored:
    return Scored(library())


def library() -> Library:
    python = os.environ.get(PYTHON) or sys.executable
    return Library(name="verifiers", file=FAR / "environments.py", extra="verifiers", python=python)
