"""The rows of one model that are being decoded. Rows join and leave between two steps.

    join: prefill new prompts in one packed row, keep their keys and values -> step: one token a row -> keep: drop rows

A row's keys stand at its own positions 0, 1, 2, ... whatever the lengths of the others. With exact numerics a row's hidden
states are those of a prefill of it alone, bit for bit, whoever joins or leaves (`model/exact`).
Invariant: a row attends to its own tokens only. With exact numerics as many rows are computed as is a multiple of ROW_UNIT.
Called by the scheduler. Left out: paged caches, reuse of a conversation's earlier turns, prefill in parts.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from shoal.model import numerics
from shoal.model.exact import KEYS, Step, rounded
from shoal.model.numerics import ROW_UNIT
from shoal.model.tree import Tree, forward_row, pack

ROOM = 64  # positions by which buffers grow beyond what is needed


def bytes_per_token(config: Any, dtype_bytes: int) -> int:
    """Keys and values of one position in all blocks."""
    depth = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * depth * dtype_bytes)


class Rows:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.exact = numerics.of(model) == "exact"
        self.lengths_B = torch.zeros(0, dtype=torch.long)  # tokens of each live row
        self.cache = _Slots(model.device)

    def __len__(self) -> int:
        return len(self.lengths_B)

    @torch.inference_mode()
    def join(self, prompts: Sequence[Sequence[int]], groups: Sequence[int]) -> list[Tensor]:
        """Append a row for each of `groups`, the index of its prompt. Returns hidden_LH of each prompt's L positions."""
        lengths = [len(prompt) for prompt in prompts]
        self.cache.receive(len(self), lengths, list(enumerate(groups)))
        packed = pack([Tree(prompt, []) for prompt in prompts]).to(self.model.device)
        hidden_TH = forward_row(self.model, packed, self.cache)
        self.lengths_B = torch.cat([self.lengths_B, torch.tensor([lengths[group] for group in groups])])
        return list(torch.split(hidden_TH[: sum(lengths)], lengths))

    @torch.inference_mode()
    def step(self, tokens_B: Tensor) -> Tensor:
        """Append a token to each row. Returns hidden_BH, that the next ones are drawn from."""
        self.lengths_B = self.lengths_B + 1
        padding = -len(self) % ROW_UNIT if self.exact else 0
        lengths_B = torch.cat([self.lengths_B, self.lengths_B.min().expand(padding)])
        longest = int(lengths_B.max())
        used = rounded(longest, KEYS) if self.exact else longest
        self.cache.begin(lengths_B - 1, used)
        attention: dict[str, Any]
        if self.exact:  # the mask is unused; 4-D, so that transformers builds none
            attention = {"layout": Step(lengths_B), "attention_mask": tokens_B.new_empty(1, 1, 1, 1)}
        else:
            seen_BK = torch.arange(used) < lengths_B[:, None]
            attention = {"attention_mask": seen_BK[:, None, None, :].to(self.model.device)}
        output = self.model.base_model(
            input_ids=F.pad(tokens_B, (0, padding))[:, None].to(self.model.device),
            position_ids=(lengths_B - 1)[:, None].to(self.model.device),
            past_key_values=self.cache,
            use_cache=True,
            **attention,
        )
        hidden_BH: Tensor = output.last_hidden_state[: len(self), -1]
        return hidden_BH

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the given old rows, in this order."""
        if not rows:
            self.cache = _Slots(self.model.device)  # an idle server holds no cache
        else:
            self.cache.keep(rows)
        self.lengths_B = self.lengths_B[torch.tensor(rows, dtype=torch.long)]


class _Slots(Cache):  # type: ignore[misc]
    """Keys and values of every block, [rows, key heads, positions, depth]; row b belongs to live row b."""

    def __init__(self, device: Any) -> None:
        super().__init__(layers=[])
        self.device = device
        self.rows = self.positions = 0  # capacity
        self.used = 0  # keys that attention reads
        self.first = 0  # row of the first new one
        self.lengths: list[int] | None = None  # of the prompts that are taken in; None: decoding
        self.copies: list[tuple[int, int]] = []  # (new row, prompt)
        self.line_N = torch.empty(0)  # where a step writes, in lines of a buffer [rows * key heads * positions, depth]
        self.batch = 0
        self.buffers: dict[tuple[int, int], Tensor] = {}  # by (block, 0 for keys or 1 for values)

    def receive(self, first: int, lengths: list[int], copies: list[tuple[int, int]]) -> None:
        """From now on, `update` takes in prompts of these lengths."""
        self.first, self.lengths, self.copies = first, lengths, copies
        self._grow(first + len(copies), max(lengths) + 1)

    def begin(self, at_B: Tensor, used: int) -> None:
        """From now on, `update` writes one position a row: at_B."""
        self.lengths, self.used, self.batch = None, used, len(at_B)
        self._grow(len(at_B), used)
        heads = self.buffers[0, 0].shape[1]
        line_Bk = torch.arange(len(at_B) * heads).view(len(at_B), heads) * self.positions + at_B[:, None]
        self.line_N = line_Bk.flatten().to(self.device)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.lengths is not None:
            self._take_in(layer_idx, 0, key)
            self._take_in(layer_idx, 1, value)
            return key, value
        return self._write(self.buffers[layer_idx, 0], key), self._write(self.buffers[layer_idx, 1], value)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.lengths is not None else self.used

    def keep(self, rows: Sequence[int]) -> None:
        """Row b becomes a copy of old row rows[b]. Only rows that move are copied."""
        moves = [(new, old) for new, old in enumerate(rows) if new != old]
        if moves:
            new_M, old_M = (torch.tensor(ends, device=self.device) for ends in zip(*moves, strict=True))
            for buffer in self.buffers.values():
                buffer[new_M] = buffer[old_M]

    def _grow(self, rows: int, positions: int) -> None:
        """Make room for that many rows and positions."""
        if rows <= self.rows and positions <= self.positions:
            return
        self.rows = max(self.rows, rounded(rows, ROW_UNIT))
        if positions > self.positions:
            self.positions = rounded(positions + ROOM, KEYS)
        for name, old in self.buffers.items():
            self.buffers[name] = self._empty(old)
            self.buffers[name][: len(old), :, : old.shape[2]] = old

    def _empty(self, like_BkPD: Tensor) -> Tensor:
        # zeros: attention multiplies what stands unused by 0
        return like_BkPD.new_zeros(self.rows, like_BkPD.shape[1], self.positions, like_BkPD.shape[3])

    def _take_in(self, block: int, part: int, x_1kTD: Tensor) -> None:
        assert self.lengths is not None
        if (block, part) not in self.buffers:
            self.buffers[block, part] = self._empty(x_1kTD)
        buffer = self.buffers[block, part]
        prompts = torch.split(x_1kTD[0, :, : sum(self.lengths)], self.lengths, dim=1)
        for row, prompt in self.copies:
            buffer[self.first + row, :, : self.lengths[prompt]] = prompts[prompt]

    def _write(self, buffer_BkPD: Tensor, x_Bk1D: Tensor) -> Tensor:
        depth = x_Bk1D.shape[-1]
        buffer_BkPD.view(-1, depth).index_copy_(0, self.line_N, x_Bk1D.reshape(-1, depth))
        return buffer_BkPD[: self.batch, :, : self.used]
