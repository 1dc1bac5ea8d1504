"""A submission under examination: what was asked, what was handed in, and what is recomputed on the way.

Invariant: a worker's figures are compared, never used; what the learner gets is what `Case` recomputed.
Called by `judge` (makes and fills it), `prefill` and `checks` (read it, and note what they measured).
"""

from dataclasses import dataclass, field

from torch import Tensor

from shoal.protocol.messages import Assignment, Reason
from shoal.store.rollouts import Header, Rollout
from shoal.tasks.arithmetic import Task
from shoal.tasks.derive import GroupPlan


@dataclass(frozen=True)
class Finding:
    """Why a submission is rejected."""

    reason: Reason
    detail: str


@dataclass(frozen=True)
class Prefill:
    """What the claimed version itself says of every completion token (N in all, rollout by rollout)."""

    hidden_NH: Tensor  # bfloat16
    logprobs_N: Tensor
    margins_N: Tensor  # nats by which the token misses being what its seed yields; 0 where it is
    evidence_NA: Tensor  # nats for each of A other ways of sampling, see `distribution`
    lengths: list[int]


@dataclass
class Case:
    assignment: Assignment
    worker: str
    header: Header
    rows: list[Rollout]
    plans: list[GroupPlan]  # one a group, derived here
    tasks: list[Task]  # one a group
    prompts: list[list[int]]  # one a group
    content_owner: str | None = None  # the submission that first held these rollouts, if there is one
    rewards: list[float] = field(default_factory=list)  # one a rollout, recomputed
    prefill: Prefill | None = None
    evidence: dict[str, float] = field(default_factory=dict)  # what the checks measured, accepted or not

    @property
    def group_size(self) -> int:
        return len(self.plans[0].seeds)

    def computed(self) -> Prefill:
        if self.prefill is None:
            raise RuntimeError("the prefill must run before the checks that read it")
        return self.prefill
