"""The interface of an environment: what answers the model between its turns.

Invariant: an environment keeps no state between calls. Where it is `deterministic`, its answer follows from the task, the
rollout's seed and the model's turns alone, on every machine: a validator computes it again from the model's own tokens and
rejects another one.
Called by `conversation`.
"""

from collections.abc import Sequence
from typing import Protocol

from shoal.tasks.task import Task


class Environment(Protocol):
    @property
    def deterministic(self) -> bool: ...

    def respond(self, task: Task, seed: int, turns: Sequence[str]) -> str | None:
        """The answer to the model's last turn; None: the conversation ends.

        `turns` is what the model wrote, turn by turn, at least one. The environment's own earlier answers follow from it.
        """
        ...
