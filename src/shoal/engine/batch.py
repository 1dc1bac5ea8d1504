"""The completions of one model that are being decoded, and one step of all of them.

    drop_cancelled -> prefill: new prompts join -> decode: sample a token a row, drop who has finished, compute the others on

A prompt is computed once for all its completions that are there: later ones begin as a copy of a sibling's keys and values.
The last live row takes the place of a finished one, so the batch shrinks without copying the other rows.
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
CACHED = 16  # rows whose float32 logits are worked on together: what fits the CPU's cache


@dataclass(frozen=True)
class DecodeRequest:
    """What is asked of a model. Raise ValueError for what would end the step of all others."""

    prompt: tuple[int, ...]
    seed: int
    temperature: float
    max_tokens: int
    echo: bool = False  # the prompt's own states are wanted

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
    """A completion while it is decoded."""

    @property
    def model(self) -> Any: ...

    @property
    def ask(self) -> DecodeRequest: ...

    @property
    def cancelled(self) -> bool: ...  # it is given up at the next step

    def began(self, hidden_LH: Tensor) -> None:
        """The final hidden states of the prompt's positions."""
        ...

    def position(self) -> int:
        """Of the token that comes next, in the completion."""
        ...

    def allowed(self) -> Tensor | None:
        """Which tokens may come next, (V,) bool; None: all."""
        ...

    def take(self, token: int, logprob: float, state_H: Tensor, logits_1V: Tensor) -> int | None:
        """What was sampled, its logprob at the sampling temperature, and the hidden state and logits it was sampled from.

        Return the token that stands at this position: the sampled one or a given one; None: the completion ends here.
        """
        ...


class DecodeBatch:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows = CachedRows(model)
        self.live: list[Decoding] = []  # by row
        self.prompt_H: list[Tensor] = []  # by row: the hidden state behind its prompt
        self.hidden_BH: Tensor | None = None  # that each row's next token is drawn from

    @torch.inference_mode()
    def prefill(self, new: Sequence[Decoding]) -> None:
        """Add rows. Prompts that no live row has are prefilled."""
        known = {one.ask.prompt: row for row, one in enumerate(self.live)}
        groups: dict[tuple[int, ...], list[Decoding]] = {}
        for one in new:
            groups.setdefault(one.ask.prompt, []).append(one)
        fresh = [
            prompt for prompt, group in groups.items() if prompt not in known or any(one.ask.echo for one in group)
        ]
        for prompt, hidden_LH in zip(fresh, self.rows.join(fresh) if fresh else [], strict=True):
            known[prompt] = len(self.live)
            self._add(groups[prompt][:1], [hidden_LH[-1].clone()])
            for one in groups[prompt]:
                if one.ask.echo:
                    one.began(hidden_LH)
        copies = [(known[prompt], one) for prompt, group in groups.items() for one in group[prompt in fresh :]]
        if copies:
            self.rows.fork([source for source, _ in copies], [len(one.ask.prompt) for _, one in copies])
            self._add([one for _, one in copies], [self.prompt_H[source] for source, _ in copies])

    def _add(self, new: Sequence[Decoding], states: Sequence[Tensor]) -> None:
        self.live += new
        self.prompt_H += states
        before = [] if self.hidden_BH is None else [self.hidden_BH]
        self.hidden_BH = torch.cat([*before, torch.stack(list(states))])

    @torch.inference_mode()
    def drop_cancelled(self) -> list[Decoding]:
        """Finish who was cancelled. Return them."""
        cancelled = [one.cancelled for one in self.live]  # each is asked once: other threads cancel meanwhile
        left = [one for one, gone in zip(self.live, cancelled, strict=True) if gone]
        self._keep([row for row, gone in enumerate(cancelled) if not gone])
        return left

    @torch.inference_mode()
    def decode(self) -> list[Decoding]:
        """Sample a token for each row, and compute the next states of unfinished rows. Return everyone who got a token."""
        drawn = list(self.live)
        placed = self._sample()
        staying = [row for row, token in enumerate(placed) if token is not None]
        kept = self._keep(staying)
        if self.live:
            self.hidden_BH = self.rows.step(torch.tensor([placed[row] for row in kept]))
        return drawn

    def _sample(self) -> list[int | None]:
        """One token a row, by its own seed and temperature; some rows at a time, so that logits stay small."""
        placed: list[int | None] = [None] * len(self.live)
        alike: dict[float, list[int]] = {}
        for row, one in enumerate(self.live):
            alike.setdefault(one.ask.temperature, []).append(row)
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        step = max(1, LOGITS_BYTES // (4 * vocabulary * ROW_UNIT)) * ROW_UNIT
        for temperature, rows in alike.items():
            for start in range(0, len(rows), step):
                some = rows[start : start + step]
                for row, token in zip(some, self._sample_alike(some, temperature), strict=True):
                    placed[row] = token
        return placed

    def _sample_alike(self, rows: Sequence[int], temperature: float) -> list[int | None]:
        assert self.hidden_BH is not None
        hidden_NH = self.hidden_BH if len(rows) == len(self.live) else self.hidden_BH[torch.tensor(rows)]
        logits_NV = logprobs.logits(self.model, hidden_NH)
        drawn = [self.live[row] for row in rows]
        scores_NV = _barred(logits_NV, [one.allowed() for one in drawn])
        seeds = [one.ask.seed for one in drawn]
        positions = [one.position() for one in drawn]
        parts = [
            choose(scores_NV[i : i + CACHED], seeds[i : i + CACHED], positions[i : i + CACHED], temperature)
            for i in range(0, len(drawn), CACHED)
        ]
        tokens_N, logprobs_N = (torch.cat(part) for part in zip(*parts, strict=True))
        states_NH = hidden_NH.to("cpu", torch.bfloat16, copy=True)
        return [
            one.take(token, logprob, states_NH[n], logits_NV[n : n + 1])
            for n, (one, token, logprob) in enumerate(zip(drawn, tokens_N.tolist(), logprobs_N.tolist(), strict=True))
        ]

    def _keep(self, staying: Sequence[int]) -> Sequence[int]:
        """Drop all rows but these. Return the old row that each new one holds."""
        if len(staying) == len(self.live):
            return staying
        kept = close_gaps(len(self.live), staying)
        self.rows.keep(kept)
        self.live = [self.live[row] for row in kept]
        self.prompt_H = [self.prompt_H[row] for row in kept]
        assert self.hidden_BH is not None
        self.hidden_BH = self.hidden_BH[torch.tensor(kept)] if kept else None
        return kept


def _barred(logits_NV: Tensor, allowed: Sequence[Tensor | None]) -> Tensor:
    """The logits, without those of tokens that may not be drawn."""
    rows = [row for row, own_V in enumerate(allowed) if own_V is not None]
    if not rows:
        return logits_NV
    scores_NV = logits_NV.clone()
    for row in rows:
        scores_NV[row, ~allowed[row].to(scores_NV.device)] = -math.inf  # type: ignore[union-attr]
    return scores_NV


def close_gaps(n_rows: int, staying: Sequence[int]) -> list[int]:
    """The old row that each remaining row holds after rows from the end took the places of those that left.

    >>> close_gaps(6, [0, 2, 3, 5])
    [0, 5, 2, 3]
    """
    stays = set(staying)
    from_the_end = (row for row in reversed(range(n_rows)) if row in stays)
    return [row if row in stays else next(from_the_end) for row in range(len(staying))]
