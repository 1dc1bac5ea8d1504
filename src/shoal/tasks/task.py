"""What a task is, what a grade is, and what every reward does.

Invariant: a task is data and is the same on every machine; a grade follows from task and completion alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from shoal.errors import UserError


@dataclass(frozen=True)
class Task:
    id: str  # "<source>/<16 hex digits of the SHA-256 of its content>"
    question: str
    answer: str  # "" where the reward needs none
    source: str = ""  # name of its source
    tests: str = ""  # JSON: the unit tests of a code task
    metadata: str = ""  # JSON: whatever else a reward or an environment needs
    reward: str = ""  # the reward that grades it where its source names none


Outcome = Literal["graded", "wrong_format", "grader_error"]


@dataclass(frozen=True)
class Grade:
    """What a reward says of one completion."""

    score: float  # in [0, 1]
    outcome: Outcome = "graded"  # wrong_format: no answer found; grader_error: the grader failed, so the score is 0
    detail: str = ""  # why, for people
    tier: str = ""  # where code ran: a tier of the sandbox, or "trusted"; "" if none ran
    repeatable: bool = True  # False: a limit was hit or nearly hit, so another machine may score differently
    parts: Mapping[str, float] = field(default_factory=dict)  # score of each reward, where several are weighted

    @property
    def certain(self) -> bool:
        """Whether every machine with the same versions gives this score.

        Not if the grader failed or came near a limit, nor if code ran: it may read clocks and addresses.
        """
        return self.repeatable and self.outcome != "grader_error" and not self.tier


class Reward(Protocol):
    def grade(self, tasks: Sequence[Task], completions: Sequence[str]) -> list[Grade]:
        """One grade per completion. A completion never raises; a grader that fails is a `grader_error`.

        SandboxError: this machine fails, which is not a grade.
        """
        ...

    def close(self) -> None:
        """End the processes it started."""
        ...


class TasksNotFoundError(UserError, ValueError):
    """Tasks cannot be read, or differ from those of the config; the message names the next step."""
