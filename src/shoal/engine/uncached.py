"""Rows of models on the slower path (`model/unpacked`): every step computes the sequences anew, without a cache.

Rows of equal length are computed together and nothing is padded.
Invariant: a row's hidden states are those of transformers' forward of it, except for rounding. Called by `rows`.
Left out: caches. Each architecture has a cache of its own, and few can be copied and cut row by row.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.model.tree import forward


class UncachedRows:
    held_bytes = 0

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows: list[list[int]] = []

    def join(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Append a row for each prompt. Returns hidden_LH of each prompt's L positions."""
        self.rows += [list(prompt) for prompt in prompts]
        return [self._forward([list(prompt)])[0] for prompt in prompts]

    def fork(self, sources: Sequence[int], lengths: Sequence[int]) -> None:
        """Append a row for each live row in `sources`, as a copy of its first tokens, so many."""
        self.rows += [self.rows[source][:length] for source, length in zip(sources, lengths, strict=True)]

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append a token to each row. Returns hidden_BH, that the next ones are drawn from."""
        for row, token in zip(self.rows, tokens_B.tolist(), strict=True):
            row.append(token)
        hidden: list[Tensor] = [torch.empty(0)] * len(self.rows)
        for length in sorted({len(row) for row in self.rows}):
            of = [number for number, row in enumerate(self.rows) if len(row) == length]
            for number, hidden_LH in zip(of, self._forward([self.rows[number] for number in of]), strict=True):
                hidden[number] = hidden_LH[-1]
        return torch.stack(hidden)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the given old rows, in this order."""
        self.rows = [self.rows[row] for row in rows]

    def _forward(self, sequences: list[list[int]]) -> Tensor:
        """Hidden states of sequences of equal length, hidden_BLH."""
        return forward(self.model, torch.tensor(sequences, device=self.model.device))
