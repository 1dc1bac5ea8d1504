"""Decoding for models on the slower path (`model/rows`): every step computes the sequences anew, without a cache.

Rows of one prompt have equal lengths, so they are computed together and nothing is padded.
Invariant: a row's hidden states are those of transformers' forward of it, except for rounding. Called by the torch engine.
Left out: caches. Each architecture has a cache of its own, and few can be copied and cut row by row.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.model import rows


class UncachedDecoding:
    """The rows that are being decoded. `first_BH` holds the hidden states that their first tokens are drawn from."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], groups: Sequence[int], max_tokens: int) -> None:
        """One row for each of `groups`: the index of its prompt."""
        self.model = model
        self.rows = [list(prompts[group]) for group in groups]
        last_PH = [self._last([list(prompt)])[0] for prompt in prompts]
        self.first_BH = torch.stack([last_PH[group] for group in groups])

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append a token to each row. Returns the hidden states that the next ones are drawn from."""
        for row, token in zip(self.rows, tokens_B.tolist(), strict=True):
            row.append(token)
        hidden: list[Tensor] = [torch.empty(0)] * len(self.rows)
        for length in sorted({len(row) for row in self.rows}):
            of = [number for number, row in enumerate(self.rows) if len(row) == length]
            for number, last_H in zip(of, self._last([self.rows[number] for number in of]), strict=True):
                hidden[number] = last_H
        return torch.stack(hidden)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the given old rows, in this order."""
        self.rows = [self.rows[row] for row in rows]

    def _last(self, sequences: list[list[int]]) -> Tensor:
        """The last position's hidden states of sequences of equal length."""
        return rows.forward(self.model, torch.tensor(sequences, device=self.model.device))[:, -1]
