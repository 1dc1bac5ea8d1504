"""Groups as training data: rows that are planned by lengths alone, and packed one at a time when they are computed.

Invariant: every token that the model wrote is a target exactly once, for any row length. Tokens of an environment are in
the forward and in no target, so they have no loss.
Advantages: GRPO (arXiv 2402.03300); without the division by std as in Dr. GRPO (arXiv 2503.20783).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.config.recipe import LossSection
from shoal.learner.groups import Array, Group, Known, Outline, outline_of
from shoal.model.attention import Span
from shoal.model.tree import Pack, Tree, pack, split_lengths
from shoal.tasks.budget import rewards_differ

K = TypeVar("K", bound=Known)
STD_EPSILON = 1e-6  # added to a group's std


def group_advantages(rewards_G: Tensor, *, normalize_std: bool) -> Tensor:
    """Reward minus the group's mean, optionally over the group's std. Return advantages_G, float32.

    The std is the sample's (over G - 1), as in TRL and verl.
    """
    exact_G = rewards_G.float().double()  # float32s sum exactly in float64: equal rewards give exactly 0
    advantages_G = exact_G - exact_G.mean()
    if normalize_std:
        advantages_G = advantages_G / (exact_G.std(correction=min(1, len(exact_G) - 1)) + STD_EPSILON)
    return advantages_G.float()


@dataclass(frozen=True)
class MicroBatch:
    """N tokens to train on in one packed row."""

    pack: Pack
    behaviour_N: Tensor
    advantage_N: Tensor
    rollout_N: Tensor  # int64: the number of each token's rollout, from 0


@dataclass(frozen=True)
class Contents:
    """What of a row its outline does not tell."""

    tokens_T: Array  # int32
    behaviour_N: Array  # float32, NaN where nobody checked it: see `with_behaviour`

    def with_behaviour(self, own_N: Array) -> "Contents":
        """Return them with the policy's own logprobs as behaviour where nobody checked any."""
        return replace(self, behaviour_N=np.where(np.isnan(self.behaviour_N), own_N, self.behaviour_N))


@dataclass(frozen=True)
class GroupPart:
    """Some completions of a group, by number, which fit a row together with its prompt."""

    group: Known
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
    """A row as every rank knows it. Whoever knows its groups has its contents, too."""

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
        """Whether all of its behaviour logprobs were checked."""
        return all(part.outline.checked for part in self.parts)

    def contents(self) -> Contents:
        """From the groups, which must be known."""
        tokens: list[Array] = []
        behaviour: list[Array] = []
        for part in self.parts:
            group = part.group
            assert isinstance(group, Group)
            tokens += [
                np.asarray(of, np.int32) for of in (group.prompt, *(group.completions[i] for i in part.completions))
            ]
            own = [np.asarray(group.behaviour[i], np.float32) for i in part.completions]
            behaviour += own if group.checked else [np.full(len(of), math.nan, np.float32) for of in own]
        return Contents(np.concatenate(tokens), np.concatenate(behaviour))

    def packed(self, contents: Contents, *, normalize_std: bool) -> MicroBatch:
        """As training data."""
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


def teaching(groups: Sequence[K], loss: LossSection) -> list[K]:
    """The groups that have a gradient. Groups of equal rewards have none if both beta and entropy are 0."""
    return [group for group in groups if loss.beta > 0 or loss.entropy > 0 or rewards_differ(group.rewards)]


def plan(groups: Iterable[Known], *, row_tokens: int) -> list[Row]:
    """Fill rows of `row_tokens` positions with the groups' trees, in the order of the groups.

    A row is full when the next tree does not fit. It is longer if one prompt and its completion need it: what the validator
    accepted can be trained on.
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
    """Return all rows of these groups, packed."""
    rows = plan(groups, row_tokens=row_tokens)
    return [row.packed(row.contents(), normalize_std=normalize_std) for row in rows]
