"""The generator and the reward `reasoning_gym`: all data sets of the library reasoning-gym, scored by its `score_answer`.

Called through `sources` and `graders`. What runs in the library's processes: `far/gym.py`.
"""

from collections.abc import Mapping
from typing import Any

from shoal.sandbox import Budget
from shoal.tasks.adapters.library import FAR, Library, Scored

LIBRARY = Library(name="reasoning_gym", file=FAR / "gym.py", extra="reasoning-gym")


def reasoning_gym(options: Mapping[str, Any]) -> list[dict[str, str]]:
    """`size` entries of a `dataset` from a `seed`, with the data set's own options. Raises TasksNotFoundError.

    The library draws some questions more than once; each is listed once.
    """
    listed: dict[str, dict[str, str]] = {}
    for row in LIBRARY.rows(options):
        listed.setdefault(row["question"], row)
    return list(listed.values())


def reward(budget: Budget | None = None) -> Scored:
    return Scored(LIBRARY, budget)
