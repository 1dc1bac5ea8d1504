"""Decoding with exact numerics: a row's hidden states are those of a prefill of it alone, bit for bit.

    prefill the prompts in one row -> copy each prompt's keys and values for its completions -> one token a row and step

A row's keys stand at its own positions 0, 1, 2, ... whatever the other rows' lengths are. They are kept in the model's
dtype; attention converts a few rows at a time.
Invariant: as many rows are computed as is a multiple of ROW_UNIT; the rows behind the live ones are never read.
Called by the torch engine. Left out: sharing a prompt's keys between its completions.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from shoal.model.exact import KEYS, Step, rounded
from shoal.model.numerics import ROW_UNIT
from shoal.model.rows import body
from shoal.model.tree import Tree, forward_row, pack

GROW_BY = 128  # positions by which a full cache grows


class ExactDecoding:
    """The rows that are being decoded. `first_BH` holds the hidden states that their first tokens are drawn from."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], groups: Sequence[int], max_tokens: int) -> None:
        """One row for each of `groups`: the index of its prompt."""
        self.model = model
        lengths_P = torch.tensor([len(prompt) for prompt in prompts])
        ends_P = lengths_P.cumsum(0)
        padding = -len(groups) % ROW_UNIT
        rows_B = torch.tensor([*groups, *[groups[0]] * padding])
        at_L = torch.arange(int(lengths_P.max()))
        index_PL = (ends_P - lengths_P)[:, None] + at_L.minimum(lengths_P[:, None] - 1)
        self.cache = _PositionCache(index_PL[rows_B], room=min(GROW_BY, max_tokens))
        hidden_TH = forward_row(model, pack([Tree(prompt, []) for prompt in prompts]), self.cache)
        self.first_BH = hidden_TH[(ends_P - 1)[rows_B[: len(groups)]]]
        self.lengths_B = lengths_P[rows_B]

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append a token to each row. Returns the hidden states that the next ones are drawn from."""
        self.lengths_B += 1
        step = Step(self.lengths_B)
        self.cache.begin(step, self.lengths_B - 1)
        output = body(self.model)(
            input_ids=F.pad(tokens_B, (0, len(self.lengths_B) - len(tokens_B)))[:, None],
            position_ids=(self.lengths_B - 1)[:, None],
            attention_mask=tokens_B.new_empty(1, 1, 1, 1),  # unused; 4-D, so that transformers builds no mask
            layout=step,
            past_key_values=self.cache,
            use_cache=True,
        )
        hidden_BH: Tensor = output.last_hidden_state[: len(tokens_B), 0]
        return hidden_BH

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the given old rows, in this order."""
        kept_B = torch.tensor([*rows, *[rows[0]] * (-len(rows) % ROW_UNIT)])
        self.lengths_B = self.lengths_B[kept_B]
        self.cache.keep(kept_B)


class _PositionCache(Cache):  # type: ignore[misc]
    """Keys and values of every block, [B, key heads, positions, depth]. At first each block's prompts are taken in."""

    def __init__(self, index_BL: Tensor, room: int) -> None:
        super().__init__(layers=[])
        self.index_BL = index_BL  # of each row's positions in the packed prompts
        self.capacity = rounded(index_BL.shape[1] + room, KEYS)
        self.rows = len(index_BL)
        self.used = 0  # keys that attention reads
        self.decoding = False  # prompts are taken in
        self.line_N = torch.empty(0)  # where `update` writes, in lines of a buffer [B * key heads * positions, depth]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def begin(self, step: Step, at_B: Tensor) -> None:
        """From now on, `update` writes one position a row: at_B."""
        self.used, self.decoding = step.keys, True
        if self.used > self.capacity:
            self.capacity = self.used + GROW_BY - KEYS
            for buffers in (self.keys, self.values):
                for block, old in enumerate(buffers):
                    buffers[block] = F.pad(old[: self.rows], (0, 0, 0, self.capacity - old.shape[2]))
        heads = self.keys[0].shape[1]
        line_Bk = torch.arange(self.rows * heads).view(self.rows, heads) * self.capacity + at_B[:, None]
        self.line_N = line_Bk.flatten()

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.decoding:
            self.keys.append(self._prompts(key))
            self.values.append(self._prompts(value))
            return key, value
        return self._write(self.keys[layer_idx], key), self._write(self.values[layer_idx], value)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.used

    def keep(self, kept_B: Tensor) -> None:
        """Row b becomes a copy of old row kept_B[b]. Only rows that move are copied."""
        new_M = torch.nonzero(kept_B != torch.arange(len(kept_B)))[:, 0]
        if len(new_M):
            for buffer in (*self.keys, *self.values):
                buffer[new_M, :, : self.used] = buffer[kept_B[new_M], :, : self.used]
        self.rows = len(kept_B)

    def _prompts(self, x_1kTD: Tensor) -> Tensor:
        rows, self.used = self.index_BL.shape
        _, heads, _, depth = x_1kTD.shape
        buffer_BkPD = torch.zeros(
            rows, heads, self.capacity, depth, dtype=x_1kTD.dtype
        )  # zeros: attention multiplies what stands unused by 0
        found_kBLD = x_1kTD[0].index_select(1, self.index_BL.flatten()).view(heads, rows, self.used, depth)
        buffer_BkPD[:, :, : self.used] = found_kBLD.transpose(0, 1)
        return buffer_BkPD

    def _write(self, buffer_BkPD: Tensor, x_Bk1D: Tensor) -> Tensor:
        depth = x_Bk1D.shape[-1]
        buffer_BkPD.view(-1, depth).index_copy_(0, self.line_N, x_Bk1D.reshape(-1, depth))
        return buffer_BkPD[: self.rows, :, : self.used]
