"""Which tasks a submission must hold: a hash of public numbers, so that nobody chooses.

Invariant: worker and validator find the same tasks, targets and seeds from the same assignment.
"""

import hashlib
from dataclasses import dataclass

from shoal.model.sampling import rollout_seed


@dataclass(frozen=True)
class GroupPlan:
    """What one group of a submission must be."""

    task_index: int  # into the training tasks
    target_length: int  # tokens; 0: none
    seeds: tuple[int, ...]  # one per completion


def plan_groups(
    *,
    run: str,
    step: int,
    policy_digest: str,
    worker: str,
    submission: int,
    groups: int,
    group_size: int,
    n_tasks: int,
    length_targets: list[int],
) -> list[GroupPlan]:
    """The plan of every group of one submission."""
    plans = []
    for group in range(groups):
        name = f"shoal/tasks\n{run}\n{step}\n{policy_digest}\n{worker}\n{submission}\n{group}".encode()
        drawn = hashlib.sha256(name).digest()
        target_at = int.from_bytes(drawn[8:16], "big")
        plans.append(
            GroupPlan(
                task_index=int.from_bytes(drawn[:8], "big") % n_tasks,
                target_length=length_targets[target_at % len(length_targets)] if length_targets else 0,
                seeds=tuple(
                    rollout_seed(run, step, worker, submission, group * group_size + g) for g in range(group_size)
                ),
            )
        )
    return plans
