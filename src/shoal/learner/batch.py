"""Groups as training data: rows that are planned by lengths alone, and packed one at a time when they are computed.

Invariant: every token that the model wrote is a target exactly once, for any row length. Tokens of an environment are in
the forward and in no target, so they have no loss. A row depends on the groups up to its last one and on no later group, so
rows can be computed while groups still arrive.
Called by `share` and `deal`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.config.recipe import LossSection
from shoal.learner.advantage import group_advantages
from shoal.learner.group import Array, Group, Known, Outline, outline_of
from shoal.model.attention import Span
from shoal.model.tree import Pack, Tree, pack, split_lengths
from shoal.tasks.budget import rewards_differ

K = TypeVar("K", bound=Known)


@dataclass(frozen=True)
class MicroBatch:
    """N tokens to train on in one packed row."""

    pack: Pack
    behaviour_N: Tensor  # NaN where nobody checked it: see `with_own_behaviour`
    advantage_N: Tensor
    rollout_N: Tensor  # int64: the number of each token's rollout, from 0
    reference_N: Tensor | None = None  # logprobs of the reference model, if they are computed already

    @property
    def spans(self) -> Sequence[Span]:
        return self.pack.layout.spans

    @property
    def n_trained(self) -> int:
        return len(self.advantage_N)


@dataclass(frozen=True)
class Contents:
    """What of a row its outline does not tell."""

    tokens_T: Array  # int32
    behaviour_N: Array  # float32, NaN where nobody checked it


@dataclass(frozen=True)
class Part:
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

    parts: Sequence[Part]

    @property
    def spans(self) -> list[Span]:
        found, at = [], 0
        for part in self.parts:
            found.append(Span(at, part.outline.prompt_tokens, tuple(part.lengths)))
            at = found[-1].end
        return found

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


class Rows:
    """Rows of `row_tokens` positions, filled with the groups' trees in the order in which the groups come.

    A row is closed when the next tree does not fit. It is longer if one prompt and its completion need it: what the
    validator accepted can be trained on. Without `packs`, each row is one completion behind its prompt (`model/tree`).
    """

    def __init__(self, *, row_tokens: int, packs: bool = True) -> None:
        self.row_tokens = row_tokens
        self.packs = packs
        self._open: list[Part] = []
        self._free = 0

    def add(self, group: Known) -> list[Row]:
        """Returns the rows that are closed by it."""
        outline = outline_of(group)
        longest = outline.prompt_tokens + max(outline.lengths)
        if not self.packs:
            return [Row([Part(group, range(number, number + 1))]) for number in range(len(outline.lengths))]
        closed = []
        for fitting in split_lengths(outline.prompt_tokens, outline.lengths, max(self.row_tokens, longest)):
            part = Part(group, fitting)
            if part.n_tokens > self._free:
                closed += self.close()
                self._free = self.row_tokens
            self._open.append(part)
            self._free -= part.n_tokens
        return closed

    def close(self) -> list[Row]:
        """The row that was still open, if any."""
        parts, self._open, self._free = self._open, [], 0
        return [Row(parts)] if parts else []


def micro_batches(
    groups: Sequence[Group], *, row_tokens: int, normalize_std: bool, packs: bool = True
) -> list[MicroBatch]:
    """All rows of these groups, packed."""
    rows = Rows(row_tokens=row_tokens, packs=packs)
    found = [row for group in groups for row in rows.add(group)] + rows.close()
    return [row.packed(row.contents(), normalize_std=normalize_std) for row in found]


def with_own_behaviour(row: MicroBatch, own_N: Tensor) -> MicroBatch:
    """The row with its own policy's logprobs as behaviour where nobody checked its own."""
    return replace(row, behaviour_N=torch.where(row.behaviour_N.isnan(), own_N, row.behaviour_N))
