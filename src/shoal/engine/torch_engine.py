"""The default engine: batched decoding in plain torch. A group's prompt is prefilled once.

    prefill P prompts -> repeat each prompt's keys and values for its G completions -> decode all rows together
    The last live row takes the place of a finished one, so the batch shrinks without copying the other rows.
    Tokens that an environment gives take the place of sampled ones, one a step.

Invariant: a completion depends on the other rows of its batch only through rounding; its noise is seeded.
Called by the worker and by evaluation. Left out: paged caches, continuous batching, prefix reuse across groups.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from shoal.engine.protocol import Completion, Respond, Sampling
from shoal.model.dtype import DtypeName
from shoal.model.load import load_model, load_weights_
from shoal.model.sampling import choose
from shoal.shardcast.fetch.inplace import advance_

GROW_BY = 64  # positions by which a full cache grows


class TorchEngine:
    """Holds one model. `load` replaces its weights in place."""

    def __init__(self, dtype: DtypeName, device: str = "cpu") -> None:
        self.dtype = dtype
        self.device = device
        self.model: Any = None
        self.folder: Path | None = None  # the source of the weights; None if they were changed since

    def load(self, folder: Path) -> None:
        if self.model is None:
            self.model = load_model(folder, self.dtype, self.device)
        elif self.folder is None or not advance_(self.model.state_dict(), self.folder, folder):
            load_weights_(self.model, folder)
        self.folder = folder

    def forget(self) -> None:
        self.folder = None

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        respond: Respond | None = None,
    ) -> list[list[Completion]]:
        if self.model is None:
            raise RuntimeError("the engine has no weights yet: call load() first")
        drafts = [[_Draft(g, number, seed) for number, seed in enumerate(group)] for g, group in enumerate(seeds)]
        live = [draft for group in drafts for draft in group]  # by batch row

        hidden_PH, caches, seen_PL = self._prefill(prompts)
        rows = torch.tensor([draft.group for draft in live])
        hidden_BH, seen_BL = hidden_PH[rows], seen_PL[rows]
        cache = GroupCache.repeat(caches, rows, room=min(GROW_BY, sampling.max_tokens))
        lengths_B = torch.tensor([len(prompts[draft.group]) for draft in live])

        for position in range(sampling.max_tokens):
            logits_BV = self.model.lm_head(hidden_BH)
            tokens_B, logprobs_B = choose(
                logits_BV, [draft.seed for draft in live], [position] * len(live), sampling.temperature
            )
            finished = []
            for row, (draft, token, logprob) in enumerate(
                zip(live, tokens_B.tolist(), logprobs_B.tolist(), strict=True)
            ):
                if draft.given:
                    tokens_B[row] = draft.take()
                    continue
                draft.add(token, logprob, hidden_BH[row].to("cpu", torch.bfloat16))
                if token in sampling.eos_ids and not draft.continues(respond, sampling.max_tokens):
                    finished.append(row)
            keep = _close_gaps(len(live), finished)
            if not keep or position + 1 == sampling.max_tokens:
                break
            if finished:
                cache.keep(keep)
                live = [live[row] for row in keep]
                rows = torch.tensor(keep)
                tokens_B, lengths_B, seen_BL = tokens_B[rows], lengths_B[rows], seen_BL[rows]
            seen_BL = torch.cat([seen_BL, seen_BL.new_ones(len(live), 1)], dim=1)
            output = self.model.base_model(
                input_ids=tokens_B[:, None],
                position_ids=(lengths_B + position)[:, None].to(self.device),
                attention_mask=seen_BL[:, None, None, :],
                past_key_values=cache,
                use_cache=True,
            )
            hidden_BH = output.last_hidden_state[:, -1]

        return [[draft.completion() for draft in group] for group in drafts]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, "GroupCache", Tensor]:
        """Left-pad the prompts and run them once. Returns the last position's hidden_PH, the cache, and seen_PL."""
        longest = max(map(len, prompts))
        ids_PL = torch.zeros(len(prompts), longest, dtype=torch.long)
        seen_PL = torch.zeros(len(prompts), longest, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids_PL[row, longest - len(prompt) :] = torch.as_tensor(prompt)
            seen_PL[row, longest - len(prompt) :] = True
        positions_PL = (seen_PL.cumsum(-1) - 1).clamp(min=0)
        itself = torch.eye(
            longest, dtype=torch.bool
        )  # keeps the softmax of padded queries defined; their output is unused
        mask_P1LL = (seen_PL[:, None, None, :] & torch.ones(longest, longest, dtype=torch.bool).tril()) | itself
        cache = GroupCache(self.model.config.num_hidden_layers)
        output = self.model.base_model(
            input_ids=ids_PL.to(self.device),
            position_ids=positions_PL.to(self.device),
            attention_mask=mask_P1LL.to(self.device),
            past_key_values=cache,
            use_cache=True,
        )
        return output.last_hidden_state[:, -1], cache, seen_PL.to(self.device)


@dataclass
class _Draft:
    """A completion while it is written."""

    group: int
    number: int  # within the group
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    given: deque[int] = field(default_factory=deque)  # what an environment wrote and is not in `tokens` yet

    def add(self, token: int, logprob: float, hidden_H: Tensor) -> None:
        """Append a sampled token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.states.append(hidden_H)

    def take(self) -> int:
        """Append the next given token, and return it."""
        self.tokens.append(self.given.popleft())
        return self.tokens[-1]

    def continues(self, respond: Respond | None, max_tokens: int) -> bool:
        """Whether another turn follows the one that ended, because an environment answers. Raises ValueError."""
        reply = respond(self.group, self.number, self.tokens, self.turns) if respond else None
        if not reply:
            return False
        if len(self.tokens) + len(reply) >= max_tokens:
            raise ValueError(f"{len(reply)} tokens given after {len(self.tokens)} leave no room below {max_tokens}")
        self.turns += [len(self.tokens) - sum(self.turns), len(reply)]
        self.given.extend(reply)
        return True

    def completion(self) -> Completion:
        return Completion(self.tokens, self.logprobs, torch.stack(self.states), self.turns)


def _close_gaps(n_rows: int, finished: Sequence[int]) -> list[int]:
    """The old row that each remaining row holds after live rows from the end took the finished rows' places.

    >>> _close_gaps(6, [1, 4])
    [0, 5, 2, 3]
    """
    gone = set(finished)
    left = n_rows - len(gone)
    from_the_end = (row for row in reversed(range(n_rows)) if row not in gone)
    return [row if row not in gone else next(from_the_end) for row in range(left)]


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
