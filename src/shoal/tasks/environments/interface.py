"""The interface of an environment: what answers the model between its turns.

Invariant: an environment keeps no state between calls. Where it is `deterministic`, its answer follows from the task, the
rollout's seed and the model's turns alone: a validator computes it again from the model's own tokens and rejects another
one. It slashes the worker unless an honest machine may give that answer too, which `tolerated` says.
Called by `conversation`. An environment inherits from `Environment`; `respond` alone is needed.
"""

from collections.abc import Sequence
from typing import Protocol

from shoal.sandbox import Budget
from shoal.tasks.task import Task


class Environment(Protocol):
    deterministic: bool = True

    def respond(self, task: Task, seed: int, turns: Sequence[str]) -> str | None:
        """The answer to the model's last turn; None: the conversation ends.

        `turns` is what the model wrote, turn by turn, at least one. The environment's own earlier answers follow from it.
        """
        ...

    def tolerated(self, task: Task, seed: int, turns: Sequence[str]) -> Sequence[str] | None:
        """Answers that an honest machine may give where another one gives another answer; None: any answer.

        Asked only where a worker reports another answer than `respond` gives here. A tolerated answer does not slash the
        worker. It is rejected all the same.
        """
        return ()

    def within(self, budget: Budget) -> None:
        """Stop the programs that it runs at the end of this budget, from now on."""
        return

    def close(self) -> None:
        """End what it started."""
        return
