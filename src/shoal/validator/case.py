"""A submission under examination: the assignment, the file, and the validator's own results.

Invariant: a `Case` never changes. Grading and prefill return a new case with their results, and checks only read a
case. The worker's figures are only compared with the recomputed ones. The learner gets none of them, with one
exception: after a spot check it gets the worker's logprobs, which it does not use.
"""

from collections.abc import Iterator, Mapping, Sequence
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
    """The result of one or several checks."""

    finding: Finding | None = None  # None: the checks passed
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Prefill:
    """What the claimed version computes for each of the N tokens that the model wrote, rollout by rollout."""

    hidden_NH: Tensor  # bfloat16
    logprobs_N: Tensor
    margins_N: Tensor  # nats: score of the token that the seed yields, minus that of the written token
    evidence_NA: Tensor  # evidence in nats for each of A other ways of sampling (see `prefill`)
    lengths: list[int]  # how many tokens of each rollout the model wrote


@dataclass(frozen=True)
class Case:
    assignment: Assignment
    worker: str
    header: Header
    rows: Sequence[Rollout]
    plans: list[GroupPlan]  # one per group, derived from the assignment
    tasks: list[Task]  # one per group
    prompts: list[list[int]]  # one per group
    rewards: list[float] = field(default_factory=list)  # one per rollout, recomputed; empty before grading
    grades: list[Grade] = field(default_factory=list)  # one per rollout; empty before grading
    prefill: Prefill | None = None
    exact: bool = False  # check without tolerance: the worker claims this validator's class, or the config requires it

    @property
    def group_size(self) -> int:
        return len(self.plans[0].seeds)

    def computed(self) -> Prefill:
        """Return the results of the prefill, which must have run."""
        if self.prefill is None:
            raise RuntimeError("the prefill must run before the checks that read it")
        return self.prefill

    def sampled(self) -> Iterator[tuple[int, int]]:
        """Yield rollout number and token of every token that the model wrote, in the order of the prefill's results."""
        for number, row in enumerate(self.rows):
            for position in model_positions(row.turns, len(row.tokens)):
                yield number, row.tokens[position]
