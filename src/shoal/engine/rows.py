"""The rows of one model that are being decoded. Rows join and leave between two steps.

    join: prefill new prompts in one packed row, keep their keys and values -> fork: copy a live row's prompt into new rows
    -> step: one token a row -> keep: drop rows

With exact numerics a row's hidden states are those of a prefill of it alone, bit for bit, whoever joins or leaves
(`model/exact`).
Invariant: a row attends to its own tokens only. With exact numerics as many rows pass through the model as is a multiple of
ROW_UNIT; those behind the live ones have no keys and are never read.
Called by `batch`. Left out: reuse of a conversation's earlier turns, prefill in parts.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.cache import GROW_BY, Slots, Taken
from shoal.engine.uncached import UncachedRows
from shoal.model import numerics
from shoal.model.exact import KEYS, Step, rounded
from shoal.model.numerics import ROW_UNIT, packs
from shoal.model.tree import Tree, body, forward_row, pack


class Rows(Protocol):
    def join(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Append a row for each prompt. Returns hidden_LH of each prompt's L positions."""
        ...

    def fork(self, sources: Sequence[int], lengths: Sequence[int]) -> None:
        """Append a row for each live row in `sources`, as a copy of its first tokens, so many."""
        ...

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append a token to each row. Returns hidden_BH, that the next ones are drawn from."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the given old rows, in this order."""
        ...

    @property
    def held_bytes(self) -> int:
        """Of keys and values, whether they are used or not."""
        ...


def rows_of(model: Any) -> Rows:
    """Empty rows of this model."""
    return CachedRows(model) if packs(model) else UncachedRows(model)


def token_bytes(model: Any) -> int:
    """Keys and values of one position in all blocks; 0 without a cache."""
    if not packs(model):
        return 0
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    depth = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * depth * model.dtype.itemsize)


def most_positions(prompt_tokens: int, max_tokens: int) -> int:
    """For how many positions a row of that many tokens ever makes buffers grow."""
    return rounded(prompt_tokens + max_tokens + GROW_BY, KEYS)


class CachedRows:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.exact = numerics.of(model) == "exact"
        self.lengths_B = torch.zeros(0, dtype=torch.long)  # tokens of each live row
        self.cache = Slots(model.device)

    def join(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        packed = pack([Tree(prompt, []) for prompt in prompts]).to(self.model.device)
        taken = Taken(packed.layout.root, [span.prompt for span in packed.layout.spans])
        self.cache.receive(len(self.lengths_B), self._longest(), taken)
        hidden_TH = forward_row(self.model, packed, self.cache)
        self.lengths_B = torch.cat([self.lengths_B, torch.tensor([len(prompt) for prompt in prompts])])
        return taken.split(hidden_TH)

    def fork(self, sources: Sequence[int], lengths: Sequence[int]) -> None:
        self.cache.fork(len(self.lengths_B), self._longest(), sources, max(lengths))
        self.lengths_B = torch.cat([self.lengths_B, torch.tensor(lengths)])

    def step(self, tokens_B: Tensor) -> Tensor:
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
        self.lengths_B = self.lengths_B[torch.tensor(rows, dtype=torch.long)]
        self.cache.keep(rows, self._longest())

    @property
    def held_bytes(self) -> int:
        return token_bytes(self.model) * self.cache.rows * self.cache.positions

    def _longest(self) -> int:
        return int(self.lengths_B.max()) if len(self.lengths_B) else 0
