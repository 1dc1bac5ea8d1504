"""The live rows of one model and their KV cache. Rows join and leave between steps.

    join: prefill new prompts in one packed row, keep their keys and values -> fork: copy a live row's prompt into new rows
    -> step: one token per row -> keep: drop rows

With exact numerics a row's hidden states equal those of a prefill of the row alone, bit for bit, whichever rows join
(`model/exact`).
Invariant: a row attends to its own tokens only. With exact numerics the batch is padded to a multiple of ROW_UNIT rows; the
padding has no keys and is never read.
Left out: reuse of a conversation's earlier turns, chunked prefill, and paging: all slots are as long as the longest row, and
the scheduler reserves that memory.
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


class CachedRows:
    """The live rows of one model, with their KV cache."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.exact = numerics.of(model) == "exact"
        self.lengths_B = torch.zeros(0, dtype=torch.long)  # tokens of each live row
        self.cache = Slots(model.device)

    def join(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Append a row for each prompt. Return hidden_LH of each prompt's L positions."""
        packed = pack([Tree(prompt, []) for prompt in prompts]).to(self.model.device)
        taken = PackedPrompts(packed.layout.root, [span.prompt for span in packed.layout.spans])
        self.cache.receive(len(self.lengths_B), self._longest(), taken)
        hidden_TH = forward_row(self.model, packed, self.cache)
        self.lengths_B = torch.cat([self.lengths_B, torch.tensor([len(prompt) for prompt in prompts])])
        return taken.split(hidden_TH)

    def fork(self, sources: Sequence[int], lengths: Sequence[int]) -> None:
        """Append a copy of each live row in `sources`, cut to its first `lengths` tokens."""
        self.cache.fork(len(self.lengths_B), self._longest(), sources, max(lengths))
        self.lengths_B = torch.cat([self.lengths_B, torch.tensor(lengths)])

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append a token to each row. Return hidden_BH, from which the next tokens are sampled."""
        self.lengths_B = self.lengths_B + 1
        at_B, longest = self.lengths_B - 1, self._longest()
        used = rounded(longest, KEYS) if self.exact else longest
        padding = -len(at_B) % ROW_UNIT if self.exact else 0
        self.cache.begin(at_B, used)
        attention: dict[str, Any]
        if self.exact:  # the mask is unused; 4-D, so that transformers builds none
            attention = {"layout": Step(self.lengths_B), "attention_mask": tokens_B.new_empty(1, 1, 1, 1)}
        else:
            seen_BK = torch.arange(used) < self.lengths_B[:, None]
            attention = {"attention_mask": seen_BK[:, None, None, :].to(self.model.device)}
        output = body(self.model)(
            input_ids=F.pad(tokens_B, (0, padding))[:, None].to(self.model.device),
            position_ids=F.pad(at_B, (0, padding))[:, None].to(self.model.device),
            past_key_values=self.cache,
            use_cache=True,
            **attention,
        )
        hidden_BH: Tensor = output.last_hidden_state[: len(at_B), -1]
        return hidden_BH

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these old rows, in this order."""
        self.lengths_B = self.lengths_B[torch.tensor(rows, dtype=torch.long)]
        self.cache.keep(rows, self._longest())

    @property
    def held_bytes(self) -> int:
        """The size of the allocated buffers."""
        return token_bytes(self.model) * self.cache.rows * self.cache.positions

    def _longest(self) -> int:
        return int(self.lengths_B.max()) if len(self.lengths_B) else 0


# --- keys and values -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedPrompts:
    """Prompts packed in one row: their common root, once, then the rest of each."""

    root: int  # tokens
    rests: list[int]

    @property
    def longest(self) -> int:
        return self.root + max(self.rests)

    def split(self, x_TX: Tensor) -> list[Tensor]:
        """Split a packed tensor by prompt, and drop padding at the end."""
        root_LX, *parts = torch.split(x_TX[: self.root + sum(self.rests)], [self.root, *self.rests])
        return [torch.cat([root_LX, part]) for part in parts] if self.root else parts


class Slots(Cache):  # type: ignore[misc]
    """The KV cache of the live rows: buffers of every block, [rows, key heads, positions, depth].

    receive: store the prompts of new rows -> fork: copy live rows into new ones -> begin: append one position per row

    Buffers grow with the rows, shrink when half of them is unused, and are freed with the last row. Row b's keys are at its
    own positions 0, 1, 2, ... in slot b, whatever the lengths of the others. Values beyond them are finite, and attention
    gives them no weight.
    """

    def __init__(self, device: Any) -> None:
        super().__init__(layers=[])
        self.device = device
        self.rows = self.positions = 0  # capacity
        self.used = 0  # keys that attention reads
        self.first = 0  # slot of the first new row
        self.taken: PackedPrompts | None = None  # the prompts being stored; None: decoding
        self.line_N = torch.empty(0)  # where a step writes, in lines of a buffer [rows * key heads * positions, depth]
        self.batch = 0
        self.buffers: dict[tuple[int, int], Tensor] = {}  # by (block, 0 for keys or 1 for values)

    def receive(self, first: int, longest: int, taken: PackedPrompts) -> None:
        """Make `update` store these prompts into slots from `first` on.

        `longest`: tokens of the longest live row.
        """
        self.first, self.taken = first, taken
        self._grow(first + len(taken.rests), max(longest, taken.longest) + 1)

    def fork(self, first: int, longest: int, sources: Sequence[int], length: int) -> None:
        """Copy live slots into those from `first` on, up to position `length`."""
        self._grow(first + len(sources), longest + 1)
        source_N = torch.tensor(sources, device=self.device)
        for buffer in self.buffers.values():
            buffer[first : first + len(sources), :, :length] = buffer[source_N, :, :length]

    def begin(self, at_B: Tensor, used: int) -> None:
        """Make `update` write one position per row: at_B."""
        self.taken, self.used, self.batch = None, used, len(at_B)
        self._grow(len(at_B), used)
        heads = self.buffers[0, 0].shape[1]
        line_Bk = torch.arange(len(at_B) * heads).view(len(at_B), heads) * self.positions + at_B[:, None]
        self.line_N = line_Bk.flatten().to(self.device)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.taken is not None:
            self._store(layer_idx, 0, key)
            self._store(layer_idx, 1, value)
            return key, value
        return self._write(self.buffers[layer_idx, 0], key), self._write(self.buffers[layer_idx, 1], value)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.taken is not None else self.used

    def keep(self, rows: Sequence[int], length: int) -> None:
        """Make row b a copy of old row rows[b], up to position `length`. Only rows that move are copied.

        Free all memory if no row is left, some if the remaining rows are few or short.
        """
        if not rows:
            self.buffers, self.rows, self.positions = {}, 0, 0
            return
        moves = [(new, old) for new, old in enumerate(rows) if new != old]
        if moves:
            new_M, old_M = (torch.tensor(ends, device=self.device) for ends in zip(*moves, strict=True))
            for buffer in self.buffers.values():
                buffer[new_M, :, :length] = buffer[old_M, :, :length]
        if 2 * len(rows) <= self.rows or 2 * _with_room(length) <= self.positions:
            self._resize(len(rows), length)

    def _grow(self, rows: int, positions: int) -> None:
        """Make room for this many rows and positions."""
        if rows > self.rows or positions > self.positions:
            self._resize(rows, positions)

    def _resize(self, rows: int, positions: int) -> None:
        self.rows, self.positions = rows, _with_room(positions)
        for name, old in self.buffers.items():  # one at a time, so that only one exists twice
            self.buffers[name] = self._empty(old)
            part = slice(min(rows, len(old))), slice(None), slice(min(self.positions, old.shape[2]))
            self.buffers[name][part] = old[part]

    def _empty(self, like_BkPD: Tensor) -> Tensor:
        # zeros, because attention multiplies unused values by 0
        return like_BkPD.new_zeros(self.rows, like_BkPD.shape[1], self.positions, like_BkPD.shape[3])

    def _store(self, block: int, part: int, x_1kTD: Tensor) -> None:
        assert self.taken is not None
        if (block, part) not in self.buffers:
            self.buffers[block, part] = self._empty(x_1kTD)
        buffer = self.buffers[block, part]
        for slot, prompt_LkD in enumerate(self.taken.split(x_1kTD[0].transpose(0, 1)), self.first):
            buffer[slot, :, : len(prompt_LkD)] = prompt_LkD.transpose(0, 1)

    def _write(self, buffer_BkPD: Tensor, x_Bk1D: Tensor) -> Tensor:
        depth = x_Bk1D.shape[-1]
        lines_Nd = x_Bk1D[: self.batch].reshape(-1, depth)
        buffer_BkPD.view(-1, depth).index_copy_(0, self.line_N, lines_Nd)
        return buffer_BkPD[: self.batch, :, : self.used]


def _with_room(positions: int) -> int:
    """Return the capacity of buffers made for `positions`."""
    return rounded(positions + min(GROW_BY, positions // 4), KEYS)
