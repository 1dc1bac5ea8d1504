"""One step's training data: accepted files become groups with advantages, and groups become packed micro-batches.

Invariant: every row is under a registered validator's signature and within the async level, checked here again.
Called by the learner's loop.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.config import Config
from shoal.learner.advantage import group_advantages
from shoal.messages import Batch
from shoal.model.tree import Pack, Tree, assign_rows, pack, split
from shoal.node import Node
from shoal.store.rollouts import AcceptedRollout, RolloutFile, read_accepted


class BatchError(Exception):
    """A batch that must not be trained on."""


@dataclass(frozen=True)
class Group:
    """G completions of one prompt, with what training needs of them."""

    submission: str
    policy_version: int
    prompt: list[int]
    completions: list[list[int]]
    behaviour: list[list[float]]  # logprobs under the version that sampled, as the validator computed them
    rewards: list[float]

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.completions))


@dataclass(frozen=True)
class MicroBatch:
    """N completion tokens in a few packed rows."""

    pack: Pack
    behaviour_N: Tensor
    advantage_N: Tensor


def fetch(node: Node, batch: Batch, config: Config) -> tuple[list[Group], int]:
    """Download and check a full batch. Returns its groups, and how many were refused for their age."""
    validators = set(node.descriptor().keys.get("validator", []))
    size = config.sampling.group_size
    files: dict[str, RolloutFile[AcceptedRollout]] = {}
    groups, refused = [], 0
    for member in batch.groups:
        if member.submission not in files:
            data = node.get_bytes(f"/v1/accepted/{member.submission}")
            files[member.submission] = read_accepted(
                data, max_rows=config.workers.groups_per_submission * size, max_tokens=config.learner.row_tokens
            )
        header = files[member.submission].header
        if header.signer not in validators:
            raise BatchError(
                f"{member.submission} is signed by {header.signer[:16]}, which is no validator of this run"
            )
        if header.run != node.invite.run or header.policy_version > batch.step:
            raise BatchError(f"{member.submission} is of run {header.run}, version {header.policy_version}")
        if batch.step - header.policy_version > config.coordinator.async_level:
            refused += 1
            continue
        rows = files[member.submission].rows[member.group * size : (member.group + 1) * size]
        if len(rows) != size or any(row.group != member.group or row.prompt != rows[0].prompt for row in rows):
            raise BatchError(f"{member.submission} has no whole group {member.group}")
        groups.append(
            Group(
                submission=member.submission,
                policy_version=header.policy_version,
                prompt=rows[0].prompt,
                completions=[row.tokens for row in rows],
                behaviour=[row.logprobs for row in rows],
                rewards=[row.reward for row in rows],
            )
        )
    if not groups:
        raise BatchError(f"step {batch.step}: every group is older than {config.coordinator.async_level} versions")
    return groups, refused


def micro_batches(
    groups: Sequence[Group], *, row_tokens: int, rows_per_microbatch: int, normalize_std: bool
) -> Iterator[MicroBatch]:
    """Pack the groups' trees into rows and hand out a few rows at a time; every token comes exactly once."""
    trees: list[Tree] = []
    behaviour: list[Tensor] = []
    advantage: list[Tensor] = []
    for group in groups:
        advantages_G = group_advantages(torch.tensor(group.rewards), normalize_std=normalize_std)
        at = 0
        for tree in split(Tree(group.prompt, group.completions), row_tokens):
            branches = range(at, at + len(tree.completions))
            trees.append(tree)
            behaviour.append(torch.tensor([p for g in branches for p in group.behaviour[g]]))
            advantage.append(torch.cat([advantages_G[g].expand(len(group.completions[g])) for g in branches]))
            at += len(tree.completions)
    rows = assign_rows([tree.n_tokens for tree in trees], row_tokens)
    for start in range(0, len(rows), rows_per_microbatch):
        members = [i for row in rows[start : start + rows_per_microbatch] for i in row]
        yield MicroBatch(
            pack=pack([trees[i] for i in members], row_tokens),
            behaviour_N=torch.cat([behaviour[i] for i in members]),
            advantage_N=torch.cat([advantage[i] for i in members]),
        )
