"""Decoding with fast numerics: a batched cache and transformers' SDPA. Results differ by rounding with the batch.

    prefill the prompts, left-padded -> repeat each prompt's keys and values for its completions -> one token a row and step

Invariant: a row attends to its own tokens only. Called by the torch engine.
Left out: paged caches, continuous batching, prefix reuse across groups.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from shoal.model.rows import body

GROW_BY = 64  # positions by which a full cache grows


class FastDecoding:
    """The rows that are being decoded. `first_BH` holds the hidden states that their first tokens are drawn from."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], groups: Sequence[int], max_tokens: int) -> None:
        """One row for each of `groups`: the index of its prompt."""
        self.model = model
        hidden_PH, caches, seen_PL = prefill(model, prompts)
        rows = torch.tensor(groups)
        self.first_BH, self.seen_BL = hidden_PH[rows], seen_PL[rows]
        self.cache = GroupCache.repeat(caches, rows, room=min(GROW_BY, max_tokens))
        self.positions_B = torch.tensor([len(prompts[group]) for group in groups])

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append a token to each row. Returns the hidden states that the next ones are drawn from."""
        self.seen_BL = torch.cat([self.seen_BL, self.seen_BL.new_ones(len(tokens_B), 1)], dim=1)
        output = body(self.model)(
            input_ids=tokens_B[:, None],
            position_ids=self.positions_B[:, None].to(self.model.device),
            attention_mask=self.seen_BL[:, None, None, :],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.positions_B += 1
        hidden_BH: Tensor = output.last_hidden_state[:, -1]
        return hidden_BH

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the given old rows, in this order."""
        self.cache.keep(rows)
        self.positions_B, self.seen_BL = self.positions_B[torch.tensor(rows)], self.seen_BL[torch.tensor(rows)]


def prefill(model: Any, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, "GroupCache", Tensor]:
    """Left-pad the prompts and run them once. Returns the last position's hidden_PH, the cache, and seen_PL."""
    longest = max(map(len, prompts))
    ids_PL = torch.zeros(len(prompts), longest, dtype=torch.long)
    seen_PL = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids_PL[row, longest - len(prompt) :] = torch.as_tensor(prompt)
        seen_PL[row, longest - len(prompt) :] = True
    positions_PL = (seen_PL.cumsum(-1) - 1).clamp(min=0)
    itself = torch.eye(longest, dtype=torch.bool)  # keeps the softmax of padded queries defined; their output is unused
    mask_P1LL = (seen_PL[:, None, None, :] & torch.ones(longest, longest, dtype=torch.bool).tril()) | itself
    cache = GroupCache(model.config.get_text_config(decoder=True).num_hidden_layers)
    output = body(model)(
        input_ids=ids_PL.to(model.device),
        position_ids=positions_PL.to(model.device),
        attention_mask=mask_P1LL.to(model.device),
        past_key_values=cache,
        use_cache=True,
    )
    return output.last_hidden_state[:, -1], cache, seen_PL.to(model.device)


class GroupCache(Cache):  # type: ignore[misc]
    """Keys and values of every layer, in buffers with room to grow. The first rows are the live ones."""

    def __init__(self, n_layers: int, room: int = 0) -> None:
        super().__init__(layers=[_GrowingLayer(room) for _ in range(n_layers)])

    @classmethod
    def repeat(cls, prompts: "GroupCache", rows: Tensor, room: int) -> "GroupCache":
        """A new cache whose row b is a copy of row rows[b] of `prompts`, which is emptied layer by layer."""
        repeated = cls(len(prompts.layers), room)
        for old, new in zip(prompts.layers, repeated.layers, strict=True):
            new.update(old.keys[rows], old.values[rows])
            old.reset()
        return repeated

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the given old rows, in this order. Only rows that move are copied."""
        for layer in self.layers:
            layer.keep_rows(rows)


class _GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's buffers [B, heads, capacity, D]. `keys` and `values` are views of the used part."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room  # positions allocated at first beyond those in use
        self.buffers: list[Tensor] = []
        self.used = 0
        self.is_initialized = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        batch, heads, new, depth = key_states.shape
        needed = self.used + new
        if not self.is_initialized or self.buffers[0].shape[2] < needed:
            room = GROW_BY if self.is_initialized else self.room
            old, self.buffers = self.buffers, [key_states.new_empty(batch, heads, needed + room, depth) for _ in "kv"]
            for before, grown in zip(old, self.buffers, strict=False):
                grown[:, :, : self.used] = before[:batch, :, : self.used]
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:batch, :, self.used : needed] = states
        self.used = needed
        self._view(batch)
        return self.keys, self.values

    def reset(self) -> None:
        self.keys = self.values = torch.empty(0)
        self.buffers, self.used, self.is_initialized = [], 0, False

    def keep_rows(self, rows: Sequence[int]) -> None:
        moves = [(new, old) for new, old in enumerate(rows) if new != old]
        if moves:
            new_rows, old_rows = (torch.tensor(ends, device=self.device) for ends in zip(*moves, strict=True))
            for buffer in self.buffers:
                buffer[new_rows, :, : self.used] = buffer[old_rows, :, : self.used]
        self._view(len(rows))

    def _view(self, batch: int) -> None:
        self.keys, self.values = (buffer[:batch, :, : self.used] for buffer in self.buffers)
