"""A submission under examination: the assignment, the file, and what the validator recomputed.

Invariant: a `Case` never changes. Grading and prefill return a new one that holds their results; checks only read it.
The worker's figures are compared with the recomputed ones, which alone reach the learner.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from shoal.model.turns import model_positions
from shoal.protocol.messages import Assignment, Reason
from shoal.store.rollouts import Header, Rollout
from shoal.tasks import Grade, Task
from shoal.tasks.derive import GroupPlan


@dataclass(frozen=True)
class Finding:
    """Why a submission is rejected."""

    reason: Reason
    detail: str


@dataclass(frozen=True)
class Outcome:
    """What a check, or several, concluded and measured."""

    finding: Finding | None = None  # None: nothing wrong
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Prefill:
    """What the claimed version computes for every token that a model wrote (N in total, rollout by rollout)."""

    hidden_NH: Tensor  # bfloat16
    logprobs_N: Tensor
    margins_N: Tensor  # nats by which the token's score misses that of the token its seed yields; 0 if it is that token
    evidence_NA: Tensor  # nats for each of A other ways of sampling, see `distribution`
    lengths: list[int]  # how many of them each rollout has


@dataclass(frozen=True)
class Case:
    assignment: Assignment
    worker: str
    header: Header
    rows: list[Rollout]
    plans: list[GroupPlan]  # one per group, derived from the assignment
    tasks: list[Task]  # one per group
    prompts: list[list[int]]  # one per group
    content_owner: str | None = None  # the accepted submission with the same rollouts, if there is one
    rewards: list[float] = field(default_factory=list)  # one per rollout, recomputed; empty before grading
    grades: list[Grade] = field(default_factory=list)  # likewise
    prefill: Prefill | None = None  # None before the prefill, or if there is none
    exact: bool = False  # whether the worker claims to compute like this validator: no tolerance

    @property
    def group_size(self) -> int:
        return len(self.plans[0].seeds)

    def graded(self) -> list[float]:
        if not self.rewards:
            raise RuntimeError("grading must run before the checks that read rewards")
        return self.rewards

    def computed(self) -> Prefill:
        if self.prefill is None:
            raise RuntimeError("the prefill must run before the checks that read it")
        return self.prefill

    def sampled(self) -> Iterator[tuple[int, int]]:
        """Every token that the model wrote, behind the number of its rollout; in the order of the prefill's results."""
        for number, row in enumerate(self.rows):
            for position in model_positions(row.turns, len(row.tokens)):
                yield number, row.tokens[position]
