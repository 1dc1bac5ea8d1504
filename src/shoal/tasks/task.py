"""Tasks, grades, and the interfaces of rewards and environments.

Invariants: a task is data, the same on every machine; a grade follows from task and completion alone. Only an environment
variable of the machine says whether its owner trusts the author of a run, never the config.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from shoal.errors import ShoalError, UserError
from shoal.sandbox import Budget

TRUST = "SHOAL_TRUST_RUN"  # a machine's owner sets it to 1 to let the run's author execute code outside the sandbox


@dataclass(frozen=True)
class Task:
    id: str  # "<source>/<16 hex digits of the SHA-256 of its content>"
    question: str
    answer: str  # "" if the reward needs none
    source: str = ""  # name of its source
    tests: str = ""  # JSON: the unit tests of a code task
    metadata: str = ""  # JSON: other data for a reward or environment
    reward: str = ""  # the reward that grades it if its source names none


Outcome = Literal["graded", "wrong_format", "grader_error"]


@dataclass(frozen=True)
class Grade:
    """A reward's result for one completion."""

    score: float  # in [0, 1]
    outcome: Outcome = "graded"  # wrong_format: no answer found; grader_error: the grader failed, so the score is 0
    detail: str = ""  # why, for people
    tier: str = ""  # where code ran: a tier of the sandbox, or "trusted"; "" if no code ran
    repeatable: bool = True  # False: near or over a limit, so another machine may score differently
    parts: Mapping[str, float] = field(default_factory=dict)  # each reward's score, if several are weighted

    @property
    def certain(self) -> bool:
        """Whether every machine with the same versions gives this score.

        False if the grader failed or came near a limit, or if code ran: it may read clocks and addresses.
        """
        return self.repeatable and self.outcome != "grader_error" and not self.tier


class Reward(Protocol):
    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        """Return one grade per completion: a `grader_error` where the grader fails. No completion makes it raise.

        Raise SandboxError if this machine fails, which is not a grade.
        """
        ...

    def close(self) -> None:
        """End the processes it started."""
        ...


class Environment(Protocol):
    """Answers the model between its turns. Subclass it; only `respond` is required.

    It keeps no state between calls. Its answer follows from the task, the rollout's seed and the model's turns alone. A
    validator computes it again from the model's own tokens and rejects a different answer. That slashes the worker, unless
    an honest machine may give that answer (`tolerated`).
    """

    def respond(self, task: Task, seed: int, turns: Sequence[str]) -> str | None:
        """Return the answer to the model's last turn; None ends the conversation.

        `turns`: what the model wrote, turn by turn, at least one. The environment's earlier answers follow from it.
        """
        ...

    def tolerated(self, task: Task, seed: int, turns: Sequence[str]) -> Sequence[str] | None:
        """Return the answers that honest machines may give instead of `respond`'s; None: any answer.

        Called only if a worker reported a different answer. A tolerated answer is rejected without slashing the worker.
        """
        return ()

    def set_budget(self, budget: Budget) -> None:
        """Stop the programs that it runs when `budget` runs out."""
        return

    def close(self) -> None:
        """End what it started."""
        return


class TasksNotFoundError(UserError, ValueError):
    """Tasks cannot be read, or differ from those of the config; the message names the next step."""


class GradeError(ShoalError):
    """A reward or environment cannot start, or breaks its contract. The message names it."""


def trusted() -> bool:
    return os.environ.get(TRUST) == "1"
