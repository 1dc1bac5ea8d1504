"""Turns groups into rows of training data. Rows are planned from lengths alone. Each row is packed when it is computed.

Invariant: every token that the model wrote is a target exactly once, for any row length. Environment tokens go through
the forward pass but are never targets, so they have no loss.
The advantages are those of GRPO (arXiv 2402.03300), or of Dr. GRPO (arXiv 2503.20783), which does not divide by the
rewards' std.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.config.recipe import LossSection
from shoal.learner.groups import AnyGroup, Array, Group, Outline, outline_of
from shoal.model.attention import Span
from shoal.model.tree import Pack, Tree, pack, split_lengths
from shoal.tasks.budget import rewards_differ

K = TypeVar("K", bound=AnyGroup)
STD_EPSILON = 1e-6  # added to a group's std, which may be 0


def group_advantages(rewards_G: Tensor, *, normalize_std: bool) -> Tensor:
    """Return advantages_G, float32: each reward minus the group's mean, optionally divided by the group's std.

    The std is the sample std (divided by G - 1), as in TRL and verl.
    """
    exact_G = rewards_G.float().double()  # float64 sums float32 values exactly, so equal rewards give exactly 0
    advantages_G = exact_G - exact_G.mean()
    if normalize_std:
        advantages_G = advantages_G / (exact_G.std(correction=min(1, len(exact_G) - 1)) + STD_EPSILON)
    return advantages_G.float()


@dataclass(frozen=True)
class MicroBatch:
    """One packed row with N trained tokens."""

    pack: Pack
    behaviour_N: Tensor  # logprobs under the sampling version
    advantage_N: Tensor  # the advantage of each token's rollout
    rollout_N: Tensor  # int64: index of each token's rollout in the row


@dataclass(frozen=True)
class Contents:
    """A row's tokens and behaviour logprobs."""

    tokens_T: Array  # int32
    behaviour_N: Array  # float32; NaN where no validator checked it (see `with_behaviour`)

    def with_behaviour(self, own_N: Array) -> "Contents":
        """Return a copy with the policy's logprobs `own_N` in place of unchecked behaviour logprobs."""
        return replace(self, behaviour_N=np.where(np.isnan(self.behaviour_N), own_N, self.behaviour_N))


@dataclass(frozen=True)
class GroupPart:
    """A range of a group's completions that fit in one row together with the prompt."""

    group: AnyGroup
    completions: range

    @property
    def outline(self) -> Outline:
        return outline_of(self.group)

    @property
    def lengths(self) -> list[int]:
        return self.outline.lengths[self.completions.start : self.completions.stop]

    @property
    def trained(self) -> list[int]:
        return self.outline.trained[self.completions.start : self.completions.stop]

    @property
    def n_tokens(self) -> int:
        return self.outline.prompt_tokens + sum(self.lengths)


@dataclass(frozen=True)
class Row:
    """A row to compute. Every rank knows its lengths. Only a rank that has the row's groups can make its contents."""

    parts: Sequence[GroupPart]

    @property
    def spans(self) -> list[Span]:
        result, at = [], 0
        for part in self.parts:
            result.append(Span(at, part.outline.prompt_tokens, tuple(part.lengths)))
            at = result[-1].end
        return result

    @property
    def n_tokens(self) -> int:
        return sum(part.n_tokens for part in self.parts)

    @property
    def n_trained(self) -> int:
        return sum(sum(part.trained) for part in self.parts)

    @property
    def checked(self) -> bool:
        """Whether a validator checked all behaviour logprobs of the row."""
        return all(part.outline.checked for part in self.parts)

    def contents(self) -> Contents:
        """Return the row's tokens and logprobs. Every part must hold a Group, not an Outline."""
        tokens: list[Array] = []
        behaviour: list[Array] = []
        for part in self.parts:
            group = part.group
            assert isinstance(group, Group)
            tokens.append(np.asarray(group.prompt, np.int32))
            tokens += [np.asarray(group.completions[i], np.int32) for i in part.completions]
            logprobs = [np.asarray(group.behaviour[i], np.float32) for i in part.completions]
            behaviour += logprobs if group.checked else [np.full_like(each, math.nan) for each in logprobs]
        return Contents(np.concatenate(tokens), np.concatenate(behaviour))

    def packed(self, contents: Contents, *, normalize_std: bool) -> MicroBatch:
        """Pack the row and compute its advantages."""
        trees, advantages, at = [], [], 0
        for part in self.parts:
            ends = np.cumsum([at + part.outline.prompt_tokens, *part.lengths])
            prompt, *completions = np.split(contents.tokens_T[: ends[-1]], ends[:-1])
            turns = [part.outline.turns[i] for i in part.completions] if part.outline.turns else []
            trees.append(Tree(prompt[at:], completions, turns if any(turns) else ()))
            of_group = group_advantages(torch.tensor(part.outline.rewards), normalize_std=normalize_std)
            advantages.append(of_group[part.completions.start : part.completions.stop])
            at = int(ends[-1])
        lengths = torch.tensor([length for part in self.parts for length in part.trained])
        return MicroBatch(
            pack=pack(trees),
            behaviour_N=torch.from_numpy(contents.behaviour_N.copy()),
            advantage_N=torch.cat(advantages).repeat_interleave(lengths),
            rollout_N=torch.arange(len(lengths)).repeat_interleave(lengths),
        )


def with_gradient(groups: Sequence[K], loss: LossSection) -> list[K]:
    """Return the groups that have a gradient. Groups of equal rewards have none if beta and entropy are both 0."""
    return [group for group in groups if loss.beta > 0 or loss.entropy > 0 or rewards_differ(group.rewards)]


def plan(groups: Iterable[AnyGroup], *, row_tokens: int) -> list[Row]:
    """Fill rows of `row_tokens` positions with the groups' trees, in order.

    A new row starts when the next tree does not fit. A row is longer than `row_tokens` only if one prompt with one
    completion is longer. So everything that a validator accepted can be trained on.
    """
    rows: list[list[GroupPart]] = []
    free = 0
    for group in groups:
        outline = outline_of(group)
        longest = outline.prompt_tokens + max(outline.lengths)
        for fitting in split_lengths(outline.prompt_tokens, outline.lengths, max(row_tokens, longest)):
            part = GroupPart(group, fitting)
            if part.n_tokens > free:
                rows.append([])
                free = row_tokens
            rows[-1].append(part)
            free -= part.n_tokens
    return [Row(parts) for parts in rows]


def micro_batches(groups: Sequence[Group], *, row_tokens: int, normalize_std: bool) -> list[MicroBatch]:
    """Plan and pack all rows of these groups."""
    rows = plan(groups, row_tokens=row_tokens)
    return [row.packed(row.contents(), normalize_std=normalize_std) for row in rows]
