"""Deals rows to the ranks: which rank computes which row, and how the row's tokens get there.

Every rank plans the same rows by their outlines, and deals them alike by cost (`balance`). Then the leader, which alone has
the tokens, sends each rank those of its own rows: plain int32 and float32, 8 bytes a token, in messages whose sizes follow
from the outlines. So a step crosses the network once, and a rank packs its own rows only, one at a time.
Invariant: the ranks together compute each row once. Called by `share`, by all ranks at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from shoal.learner.balance import cost, order
from shoal.learner.batch import Contents, MicroBatch, Row, with_own_behaviour
from shoal.learner.metrics import Shape
from shoal.learner.ranks import Ranks


@dataclass
class Turn:
    """One row on each rank, computed at the same time."""

    row: Row | None  # this rank's own; none: it idles
    contents: Contents | None  # of it; none: the groups are known here
    costs: list[float]  # of all ranks' rows
    n_trained: int  # tokens of all ranks' rows
    checked: bool  # all of their behaviour logprobs
    normalize_std: bool
    own_N: Tensor | None = None  # the logprobs of this rank's row by the step's first policy, where they are needed
    reference_N: Tensor | None = None  # by the reference, if they are computed early
    seen: bool = False  # what is needed of `own_N` is computed, on all ranks
    referenced: bool = False  # `reference_N` is, on all ranks
    ready: bool = False  # nothing is left that can be computed early

    def micro(self) -> MicroBatch | None:
        """This rank's row, packed."""
        if self.row is None:
            return None
        contents = self.row.contents() if self.contents is None else self.contents
        found = self.row.packed(contents, normalize_std=self.normalize_std)
        return replace(found, reference_N=self.reference_N)

    def to_train(self, *, recomputed: bool) -> MicroBatch | None:
        """`micro`, with the policy's own logprobs as behaviour: all if `recomputed`, else where nobody checked any."""
        found = self.micro()
        if found is None or self.own_N is None:
            return found
        return replace(found, behaviour_N=self.own_N) if recomputed else with_own_behaviour(found, self.own_N)


def deal(rows: Sequence[Row], ranks: Ranks, shape: Shape, *, normalize_std: bool) -> list[Turn]:
    """The turns in which the ranks compute these rows."""
    costs = [cost(row, shape) for row in rows]
    dealt = order(costs, ranks.size)
    own = [None if number is None else rows[number] for number in ranks.scatter(dealt)]
    contents = _exchanged(rows, dealt, own, ranks) if ranks.size > 1 else [None] * len(own)
    turns = []
    for at, (row, found) in enumerate(zip(own, contents, strict=True)):
        together = dealt[at * ranks.size : (at + 1) * ranks.size]
        turns.append(
            Turn(
                row,
                found,
                [costs[number] for number in together],
                sum(rows[number].n_trained for number in together),
                all(rows[number].checked for number in together),
                normalize_std,
            )
        )
    return turns


def _exchanged(
    rows: Sequence[Row], dealt: Sequence[int], own: Sequence[Row | None], ranks: Ranks
) -> list[Contents | None]:
    """The contents of this rank's own rows, which the leader sends."""
    messages = None
    if ranks.leads:
        messages = [
            encode([rows[number].contents() for number in dealt[rank :: ranks.size]]) for rank in range(ranks.size)
        ]
    mine = [row for row in own if row is not None]
    size_bytes = 4 * sum(row.n_tokens + row.n_trained for row in mine)
    found = iter(decode(ranks.deal(messages, size_bytes), mine))
    return [None if row is None else next(found) for row in own]


def encode(contents: Sequence[Contents]) -> bytes:
    """Tokens and behaviour logprobs, row by row, without anything else."""
    return b"".join(array.tobytes() for of in contents for array in (of.tokens_T, of.behaviour_N))


def decode(data: bytes, rows: Sequence[Row]) -> list[Contents]:
    """What `encode` made of these rows. Raises ValueError if the sizes differ."""
    found, at = [], 0
    for row in rows:
        tokens_T = np.frombuffer(data, np.int32, row.n_tokens, at)
        at += tokens_T.nbytes
        behaviour_N = np.frombuffer(data, np.float32, row.n_trained, at)
        at += behaviour_N.nbytes
        found.append(Contents(tokens_T, behaviour_N))
    if at != len(data):
        raise ValueError(f"{len(data)} bytes for rows of {at}: the ranks planned different rows")
    return found
