"""Groups as training data: with advantages, and packed into rows that are computed one at a time.

Invariant: every token that the model wrote is a target exactly once, for any row length. Tokens of an environment are in
the forward and in no target, so they have no loss. A row depends on the groups up to its last one and on no later group, so
rows can be computed while groups still arrive.
Called by `share`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.config.recipe import LossSection
from shoal.learner.advantage import group_advantages
from shoal.learner.groups import Group
from shoal.model.tree import Pack, Tree, pack, split
from shoal.tasks.budget import rewards_differ


@dataclass(frozen=True)
class MicroBatch:
    """N tokens to train on in one packed row."""

    pack: Pack
    behaviour_N: Tensor  # NaN where nobody checked it: see `with_own_behaviour`
    advantage_N: Tensor
    rollout_N: Tensor  # int64: the number of each token's rollout, from 0


@dataclass(frozen=True)
class _Part:
    """A tree that fits a row, with the logprobs and advantages of its completions."""

    tree: Tree
    behaviour: list[list[float]]
    advantages: list[float]

    def alone(self) -> Iterator["_Part"]:
        """Each completion as a part of its own."""
        branches = zip(self.tree.branches(), self.behaviour, self.advantages, strict=True)
        for (completion, turns), behaviour, advantage in branches:
            yield _Part(Tree(self.tree.prompt, [completion], [turns] if turns else ()), [behaviour], [advantage])


def teaching(groups: Sequence[Group], loss: LossSection) -> list[Group]:
    """The groups that have a gradient. Groups of equal rewards have none if both beta and entropy are 0."""
    return [group for group in groups if loss.beta > 0 or loss.entropy > 0 or rewards_differ(group.rewards)]


class Rows:
    """Rows of `row_tokens` positions, filled with the groups' trees in the order in which the groups come.

    A row is closed when the next tree does not fit. It is longer if one prompt and its completion need it: what the
    validator accepted can be trained on. Without `packs`, each row is one completion behind its prompt (`model/rows`).
    """

    def __init__(self, *, row_tokens: int, normalize_std: bool, packs: bool = True) -> None:
        self.row_tokens = row_tokens
        self.normalize_std = normalize_std
        self.packs = packs
        self._open: list[_Part] = []
        self._free = 0

    def add(self, group: Group) -> list[MicroBatch]:
        """Returns the rows that are closed by it."""
        longest = len(group.prompt) + max(map(len, group.completions))
        parts = _parts(group, max(self.row_tokens, longest), self.normalize_std)
        if not self.packs:
            return [_micro_batch([one]) for part in parts for one in part.alone()]
        closed = []
        for part in parts:
            if part.tree.n_tokens > self._free:
                closed += self.close()
                self._free = self.row_tokens
            self._open.append(part)
            self._free -= part.tree.n_tokens
        return closed

    def close(self) -> list[MicroBatch]:
        """The row that was still open, if any."""
        parts, self._open, self._free = self._open, [], 0
        return [_micro_batch(parts)] if parts else []


def micro_batches(
    groups: Sequence[Group], *, row_tokens: int, normalize_std: bool, packs: bool = True
) -> list[MicroBatch]:
    """All rows of these groups."""
    rows = Rows(row_tokens=row_tokens, normalize_std=normalize_std, packs=packs)
    return [row for group in groups for row in rows.add(group)] + rows.close()


def with_own_behaviour(rows: Sequence[MicroBatch], own: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The rows with the behaviour of `own` where nobody checked theirs."""
    return [
        replace(row, behaviour_N=torch.where(row.behaviour_N.isnan(), other.behaviour_N, row.behaviour_N))
        for row, other in zip(rows, own, strict=True)
    ]


def _parts(group: Group, row_tokens: int, normalize_std: bool) -> list[_Part]:
    advantages = group_advantages(torch.tensor(group.rewards), normalize_std=normalize_std).tolist()
    behaviour = group.behaviour if group.checked else [[math.nan] * len(of) for of in group.behaviour]
    parts, at = [], 0
    for tree in split(Tree(group.prompt, group.completions, group.turns), row_tokens):
        end = at + len(tree.completions)
        parts.append(_Part(tree, behaviour[at:end], advantages[at:end]))
        at = end
    return parts


def _micro_batch(parts: Sequence[_Part]) -> MicroBatch:
    lengths = torch.tensor([len(logprobs) for part in parts for logprobs in part.behaviour])
    advantages = torch.tensor([advantage for part in parts for advantage in part.advantages])
    return MicroBatch(
        pack=pack([part.tree for part in parts]),
        behaviour_N=torch.tensor([p for part in parts for rollout in part.behaviour for p in rollout]),
        advantage_N=advantages.repeat_interleave(lengths),
        rollout_N=torch.arange(len(lengths)).repeat_interleave(lengths),
    )
