"""Derive the tasks of a submission from a hash of its assignment, so that nobody can choose them.

The assignment's nonce makes the tasks unpredictable until the worker receives it (`coordinator/assignment`).
Invariant: worker and validator derive the same tasks, targets and seeds from the same assignment, with this code.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from shoal.config import Config
from shoal.model.sampling import rollout_seed
from shoal.protocol.messages import Assignment
from shoal.tasks.taskset import TaskSet


@dataclass(frozen=True)
class GroupPlan:
    """The task, target length and seeds of one group of a submission."""

    task_index: int  # index in the training tasks
    target_length: int  # in tokens; 0 means no target
    seeds: tuple[int, ...]  # one per completion


def plan_submission(config: Config, run: str, assignment: Assignment, worker: str, tasks: TaskSet) -> list[GroupPlan]:
    """Return the plan of the submission that `worker` owes for this assignment."""
    return plan_groups(
        run=run,
        step=assignment.step,
        policy_digest=assignment.policy_digest,
        worker=worker,
        submission=assignment.number,
        nonce=assignment.nonce,
        groups=assignment.groups,
        group_size=config.sampling.group_size,
        pick=tasks.pick,
        length_targets=config.tasks.length_targets,
    )


def max_rollouts(config: Config) -> int:
    """Return the largest number of rollouts in one submission; readers refuse larger files."""
    return config.workers.largest * config.sampling.group_size


def plan_groups(
    *,
    run: str,
    step: int,
    policy_digest: str,
    worker: str,
    submission: int,
    nonce: str,
    groups: int,
    group_size: int,
    pick: Callable[[bytes], int],
    length_targets: list[int],
) -> list[GroupPlan]:
    """Return the plan of every group of one submission. `pick` draws a task's index from 32 random bytes."""
    plans = []
    for group in range(groups):
        name = f"shoal/tasks\n{run}\n{step}\n{policy_digest}\n{worker}\n{submission}\n{group}\n{nonce}"
        drawn = hashlib.sha256(name.encode()).digest()
        target_at = int.from_bytes(drawn[8:16], "big")
        plans.append(
            GroupPlan(
                task_index=pick(drawn),
                target_length=length_targets[target_at % len(length_targets)] if length_targets else 0,
                seeds=tuple(
                    rollout_seed(run, step, worker, submission, group * group_size + g, nonce)
                    for g in range(group_size)
                ),
            )
        )
    return plans
