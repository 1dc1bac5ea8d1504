"""The batch of one model: all sequences being decoded, and one decoding step.

    drop_cancelled -> prefill: add new prompts -> decode: sample a token per row, drop finished rows, compute the next states

A prompt is prefilled once for its completions: later ones start with a copy of a sibling's keys and values. The last live
row moves into a finished one's place, so the batch shrinks without copying the other rows.
Invariant: a completion sees its tokens in order and none after its last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.engine.rows import CachedRows
from shoal.model import logprobs
from shoal.model.numerics import ROW_UNIT
from shoal.model.sampling import choose

LOGITS_BYTES = 64 << 20  # float32 logits in memory at once
CACHED = 16  # rows whose float32 logits are processed together: they fit the CPU's cache


@dataclass(frozen=True)
class DecodeRequest:
    """One completion to decode. Raise ValueError for values that would fail the whole batch."""

    prompt: tuple[int, ...]
    seed: int
    temperature: float
    max_tokens: int
    echo: bool = False  # also return the prompt's hidden states

    def __post_init__(self) -> None:
        if not self.prompt or self.max_tokens < 1:
            raise ValueError(
                f"a prompt of {len(self.prompt)} tokens and max_tokens {self.max_tokens}: both must be 1 or more"
            )
        if not 0 <= self.seed < 1 << 64 or not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"seed {self.seed} is not of 64 bits, or temperature {self.temperature} is not a finite number"
            )


class Decoding(Protocol):
    """A sequence that is being decoded."""

    @property
    def model(self) -> Any: ...

    @property
    def ask(self) -> DecodeRequest: ...

    @property
    def cancelled(self) -> bool: ...  # dropped at the next step

    def began(self, hidden_LH: Tensor) -> None:
        """Receive the final hidden states of the prompt's positions."""
        ...

    def position(self) -> int:
        """Return the next token's position in the completion."""
        ...

    def take(self, token: int, logprob: float, state_H: Tensor, logits_1V: Tensor) -> int | None:
        """Receive the sampled token, its logprob at the sampling temperature, and its hidden state and logits.

        Return the token to append: the sampled one or a given one; None: the completion ends here.
        """
        ...


class DecodeBatch:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows = CachedRows(model)
        self.live: list[Decoding] = []  # by row
        self.prompt_H: list[Tensor] = []  # by row: the hidden state of its prompt's last token
        self.hidden_BH: Tensor | None = None  # from which each row's next token is sampled

    @torch.inference_mode()
    def prefill(self, new: Sequence[Decoding]) -> None:
        """Add rows. Prefill prompts that no live row has."""
        known = {seq.ask.prompt: row for row, seq in enumerate(self.live)}
        groups: dict[tuple[int, ...], list[Decoding]] = {}
        for seq in new:
            groups.setdefault(seq.ask.prompt, []).append(seq)
        fresh = [
            prompt for prompt, group in groups.items() if prompt not in known or any(seq.ask.echo for seq in group)
        ]
        for prompt, hidden_LH in zip(fresh, self.rows.join(fresh) if fresh else [], strict=True):
            known[prompt] = len(self.live)
            self._add(groups[prompt][:1], [hidden_LH[-1].clone()])
            for seq in groups[prompt]:
                if seq.ask.echo:
                    seq.began(hidden_LH)
        copies = [(known[prompt], seq) for prompt, group in groups.items() for seq in group[prompt in fresh :]]
        if copies:
            self.rows.fork([source for source, _ in copies], [len(seq.ask.prompt) for _, seq in copies])
            self._add([seq for _, seq in copies], [self.prompt_H[source] for source, _ in copies])

    def _add(self, new: Sequence[Decoding], states: Sequence[Tensor]) -> None:
        self.live += new
        self.prompt_H += states
        before = [] if self.hidden_BH is None else [self.hidden_BH]
        self.hidden_BH = torch.cat([*before, torch.stack(list(states))])

    @torch.inference_mode()
    def drop_cancelled(self) -> list[Decoding]:
        """Drop cancelled sequences and return them."""
        cancelled = [seq.cancelled for seq in self.live]  # read each once: other threads cancel concurrently
        dropped = [seq for seq, gone in zip(self.live, cancelled, strict=True) if gone]
        self._keep([row for row, gone in enumerate(cancelled) if not gone])
        return dropped

    @torch.inference_mode()
    def decode(self) -> list[Decoding]:
        """Sample a token for each row and compute the next states of unfinished rows. Return all that got a token."""
        drawn = list(self.live)
        placed = self._sample()
        staying = [row for row, token in enumerate(placed) if token is not None]
        kept = self._keep(staying)
        if self.live:
            self.hidden_BH = self.rows.step(torch.tensor([placed[row] for row in kept]))
        return drawn

    def _sample(self) -> list[int | None]:
        """Sample one token per row, by its seed and temperature, in chunks of rows to bound the logits' memory."""
        placed: list[int | None] = [None] * len(self.live)
        by_temperature: dict[float, list[int]] = {}
        for row, seq in enumerate(self.live):
            by_temperature.setdefault(seq.ask.temperature, []).append(row)
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        step = max(1, LOGITS_BYTES // (4 * vocabulary * ROW_UNIT)) * ROW_UNIT
        for temperature, rows in by_temperature.items():
            for start in range(0, len(rows), step):
                chunk = rows[start : start + step]
                for row, token in zip(chunk, self._sample_chunk(chunk, temperature), strict=True):
                    placed[row] = token
        return placed

    def _sample_chunk(self, rows: Sequence[int], temperature: float) -> list[int | None]:
        assert self.hidden_BH is not None
        hidden_NH = self.hidden_BH if len(rows) == len(self.live) else self.hidden_BH[torch.tensor(rows)]
        logits_NV = logprobs.logits(self.model, hidden_NH)
        drawn = [self.live[row] for row in rows]
        seeds = [seq.ask.seed for seq in drawn]
        positions = [seq.position() for seq in drawn]
        parts = [
            choose(logits_NV[i : i + CACHED], seeds[i : i + CACHED], positions[i : i + CACHED], temperature)
            for i in range(0, len(drawn), CACHED)
        ]
        tokens_N, logprobs_N = (torch.cat(part) for part in zip(*parts, strict=True))
        states_NH = hidden_NH.to("cpu", torch.bfloat16, copy=True)
        return [
            seq.take(token, logprob, states_NH[n], logits_NV[n : n + 1])
            for n, (seq, token, logprob) in enumerate(zip(drawn, tokens_N.tolist(), logprobs_N.tolist(), strict=True))
        ]

    def _keep(self, staying: Sequence[int]) -> Sequence[int]:
        """Drop all rows but these. Return the old index of each new row."""
        if len(staying) == len(self.live):
            return staying
        kept = close_gaps(len(self.live), staying)
        self.rows.keep(kept)
        self.live = [self.live[row] for row in kept]
        self.prompt_H = [self.prompt_H[row] for row in kept]
        assert self.hidden_BH is not None
        self.hidden_BH = self.hidden_BH[torch.tensor(kept)] if kept else None
        return kept


def close_gaps(n_rows: int, staying: Sequence[int]) -> list[int]:
    """Return the old index of each remaining row after rows from the end moved into the places of dropped ones.

    >>> close_gaps(6, [0, 2, 3, 5])
    [0, 5, 2, 3]
    """
    stays = set(staying)
    from_the_end = (row for row in reversed(range(n_rows)) if row in stays)
    return [row if row in stays else next(from_the_end) for row in range(len(staying))]
