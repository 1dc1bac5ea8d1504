"""Tasks, grades, and the interfaces of rewards and environments.

Invariants: a task is data, and the same on every machine. A grade depends only on the task and the completion. A
machine's owner states in an environment variable whether the author of a run is trusted. The config cannot state it.
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
    reward: str = ""  # grades the task if its source names no reward

    def served(self) -> "Task":
        """Return what a worker may have of this task, if it has it with its metadata."""
        return Task("", self.question, "", self.source, metadata=self.metadata)


Outcome = Literal["graded", "wrong_format", "grader_error"]


@dataclass(frozen=True)
class Grade:
    """A reward's result for one completion."""

    score: float  # in [0, 1]
    outcome: Outcome = "graded"  # wrong_format: no answer found; grader_error: the grader failed, so the score is 0
    detail: str = ""  # why, for people
    tier: str = ""  # where code ran: a tier of the sandbox, or "trusted"; "" if no code ran
    repeatable: bool = True  # False: it came near a limit or passed it, so another machine may score differently
    parts: Mapping[str, float] = field(default_factory=dict)  # if several rewards are weighted, the score of each

    @property
    def certain(self) -> bool:
        """Return whether every machine with the same versions gives this score.

        It is False if the grader failed or came near a limit, or if code ran, which may read clocks and addresses.
        """
        return self.repeatable and self.outcome != "grader_error" and not self.tier

    def in_range(self) -> "Grade":
        """Return this grade, or a `grader_error` if its score is outside of [0, 1] or NaN."""
        if 0 <= self.score <= 1:
            return self
        return Grade(0.0, "grader_error", f"it returned {self.score}; scores must be within [0, 1]", repeatable=False)


class Reward(Protocol):
    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        """Return one grade per completion. If the grader fails on a completion, its grade is a `grader_error`.

        Raise SandboxError if this machine fails. No completion may cause this error.
        """
        ...

    def close(self) -> None:
        """End the processes that the reward started."""
        ...


class Environment(Protocol):
    """Answers the model between its turns. Subclass it; only `respond` is required.

    An environment keeps no state between calls. Its answer depends only on the task, the rollout's seed and the model's
    turns. A validator computes the answer again and rejects a submission with a different one. Of a task, read only
    question and source, because workers have no more; a user's class also gets metadata.
    """

    repeatable: bool = True
    """Whether all honest machines give the same answer. Only then is a worker slashed for a different one."""

    def respond(self, task: Task, seed: int, turns: Sequence[str]) -> str | None:
        """Return the answer to the model's last turn; None ends the conversation.

        `turns`: the text of each of the model's turns, at least one. They determine the environment's earlier answers.
        """
        ...

    def set_budget(self, budget: Budget) -> None:
        """Stop the environment's programs when `budget` runs out."""
        return

    def close(self) -> None:
        """End the processes that the environment started."""
        return


class TasksNotFoundError(UserError, ValueError):
    """Tasks cannot be read, or differ from those of the config. The message says what to do."""


class GradeError(ShoalError):
    """A reward or environment cannot start, or breaks its contract. The message names it."""


def trusted() -> bool:
    return os.environ.get(TRUST) == "1"
