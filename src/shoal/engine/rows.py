"""The live rows of one model and their KV cache. Rows join and leave between steps.

    join: prefill new prompts in one packed row, keep their keys and values -> fork: copy a live row's prompt into new rows
    -> step: append one token per row -> keep: drop rows

Invariant: a row attends to its own tokens only. With exact numerics (`model/exact`) its hidden states equal those of a
prefill of the row alone, bit for bit, whichever rows join. For this, the batch is padded to a multiple of ROW_UNIT rows.
The padding has no keys and is never read.
Left out: reuse of a conversation's earlier turns, chunked prefill, and paging. Without paging, each row has as much memory
as the longest row, and the scheduler reserves that memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from shoal.model import numerics
from shoal.model.exact import KEYS, Step, rounded
from shoal.model.numerics import ROW_UNIT
from shoal.model.tree import Tree, body, forward_row, pack

GROW_BY = 128  # full buffers grow by a quarter, but at most by this many positions


def token_bytes(model: Any) -> int:
    """Return the bytes of one position's keys and values in all blocks."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    depth = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * depth * model.dtype.itemsize)


def max_positions(prompt_tokens: int, max_tokens: int) -> int:
    """Return the number of positions to which a row of this length can make the buffers grow."""
    return rounded(prompt_tokens + max_tokens + GROW_BY, KEYS)


@dataclass(frozen=True)
class PackedPrompts:
    """The layout of prompts in one packed row, in tokens: the prefix that all share, then the rest of each prompt."""

    root: int
    suffixes: list[int]

    def split(self, x_TX: Tensor) -> list[Tensor]:
        """Split a packed tensor by prompt, and drop padding at the end."""
        root_LX, *parts = torch.split(x_TX[: self.root + sum(self.suffixes)], [self.root, *self.suffixes])
        return [torch.cat([root_LX, part]) for part in parts] if self.root else parts


class CachedRows(Cache):  # type: ignore[misc]
    """The live rows of one model and their KV cache: buffers of every block, [rows, key heads, positions, depth].

    Row b's keys are at its own positions 0, 1, 2, ... in buffer row b, whatever the lengths of the other rows. Numbers
    stored beyond these positions are finite, and attention gives them no weight. Buffers grow with the rows, shrink when
    half their space is unused, and are freed with the last row.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(layers=[])
        self.model = model
        self.exact = numerics.of(model) == "exact"
        self.lengths_B = torch.zeros(0, dtype=torch.long)  # tokens of each live row
        self.rows = self.positions = 0  # capacity
        self.buffers: dict[tuple[int, int], Tensor] = {}  # by (block, 0 for keys or 1 for values)
        # Where the current forward pass writes and reads:
        self.prompts: PackedPrompts | None = None  # being prefilled into new rows; None: decoding
        self.line_N = torch.empty(0)  # the lines to write, in a buffer seen as [rows * key heads * positions, depth]
        self.used = 0  # positions that attention reads

    def join(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Append a row for each prompt. Return hidden_LH of each prompt's L positions."""
        packed = pack([Tree(prompt, []) for prompt in prompts]).to(self.model.device)
        self.prompts = PackedPrompts(packed.layout.root, [span.prompt for span in packed.layout.spans])
        lengths_B = torch.cat([self.lengths_B, torch.tensor([len(prompt) for prompt in prompts])])
        self._grow(len(lengths_B), int(lengths_B.max()) + 1)
        hidden_TH = forward_row(self.model, packed, self)
        self.lengths_B = lengths_B
        return self.prompts.split(hidden_TH)

    def fork(self, sources: Sequence[int], lengths: Sequence[int]) -> None:
        """Append a copy of each live row in `sources`, cut to its first `lengths` tokens."""
        first, length = len(self.lengths_B), max(lengths)
        self._grow(first + len(sources), self._longest() + 1)
        source_N = torch.tensor(sources, device=self.model.device)
        for buffer in self.buffers.values():
            buffer[first : first + len(sources), :, :length] = buffer[source_N, :, :length]
        self.lengths_B = torch.cat([self.lengths_B, torch.tensor(lengths)])

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append a token to each row. Return hidden_BH, from which the next tokens are sampled."""
        at_B, self.lengths_B = self.lengths_B, self.lengths_B + 1
        longest = self._longest()
        self.prompts, self.used = None, rounded(longest, KEYS) if self.exact else longest
        self._grow(len(at_B), self.used)
        heads = self.buffers[0, 0].shape[1]
        line_Bk = torch.arange(len(at_B) * heads).view(len(at_B), heads) * self.positions + at_B[:, None]
        self.line_N = line_Bk.flatten().to(self.model.device)
        padding = -len(at_B) % ROW_UNIT if self.exact else 0
        attention: dict[str, Any]
        if self.exact:  # the mask is not used; because it is 4-D, transformers does not build another
            attention = {"layout": Step(self.lengths_B), "attention_mask": tokens_B.new_empty(1, 1, 1, 1)}
        else:
            seen_BK = torch.arange(self.used) < self.lengths_B[:, None]
            attention = {"attention_mask": seen_BK[:, None, None, :].to(self.model.device)}
        output = body(self.model)(
            input_ids=F.pad(tokens_B, (0, padding))[:, None].to(self.model.device),
            position_ids=F.pad(at_B, (0, padding))[:, None].to(self.model.device),
            past_key_values=self,
            use_cache=True,
            **attention,
        )
        hidden_BH: Tensor = output.last_hidden_state[: len(at_B), -1]
        return hidden_BH

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order. Copy only rows that move.

        Free all memory if no row is left. Free some memory if the remaining rows are few or short.
        """
        self.lengths_B = self.lengths_B[torch.tensor(rows, dtype=torch.long)]
        if not rows:
            self.buffers, self.rows, self.positions = {}, 0, 0
            return
        length = self._longest()
        moves = [(new, old) for new, old in enumerate(rows) if new != old]
        if moves:
            new_M, old_M = (torch.tensor(ends, device=self.model.device) for ends in zip(*moves, strict=True))
            for buffer in self.buffers.values():
                buffer[new_M, :, :length] = buffer[old_M, :, :length]
        if 2 * len(rows) <= self.rows or 2 * _with_room(length) <= self.positions:
            self._resize(len(rows), length)

    @property
    def allocated_bytes(self) -> int:
        return token_bytes(self.model) * self.rows * self.positions

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store a block's new keys and values. Return the ones to attend to. Called once per block and pass."""
        if self.prompts is None:
            return self._append(self.buffers[layer_idx, 0], key), self._append(self.buffers[layer_idx, 1], value)
        for part, x_1kTD in enumerate((key, value)):
            if (layer_idx, part) not in self.buffers:
                self.buffers[layer_idx, part] = self._empty(x_1kTD)
            prompts = self.prompts.split(x_1kTD[0].transpose(0, 1))
            for row, prompt_LkD in enumerate(prompts, len(self.lengths_B)):
                self.buffers[layer_idx, part][row, :, : len(prompt_LkD)] = prompt_LkD.transpose(0, 1)
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.used if self.prompts is None else 0

    def _append(self, buffer_BkPD: Tensor, x_Bk1D: Tensor) -> Tensor:
        batch, depth = len(self.lengths_B), x_Bk1D.shape[-1]
        buffer_BkPD.view(-1, depth).index_copy_(0, self.line_N, x_Bk1D[:batch].reshape(-1, depth))
        return buffer_BkPD[:batch, :, : self.used]

    def _longest(self) -> int:
        return int(self.lengths_B.max()) if len(self.lengths_B) else 0

    def _grow(self, rows: int, positions: int) -> None:
        if rows > self.rows or positions > self.positions:
            self._resize(rows, positions)

    def _resize(self, rows: int, positions: int) -> None:
        self.rows, self.positions = rows, _with_room(positions)
        for name, old in self.buffers.items():  # one at a time, so that only one buffer is in memory twice
            self.buffers[name] = self._empty(old)
            part = slice(min(rows, len(old))), slice(None), slice(min(self.positions, old.shape[2]))
            self.buffers[name][part] = old[part]

    def _empty(self, like_BkPD: Tensor) -> Tensor:
        # zeros, because attention multiplies unused values by 0
        return like_BkPD.new_zeros(self.rows, like_BkPD.shape[1], self.positions, like_BkPD.shape[3])


def _with_room(positions: int) -> int:
    """Return the capacity of buffers made for `positions`."""
    return rounded(positions + min(GROW_BY, positions // 4), KEYS)
