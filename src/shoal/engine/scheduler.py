"""Continuous batching: decode the completions of any number of callers together; as soon as one ends, a waiting one starts.

    step: drop cancelled completions -> schedule waiting ones within the limits -> prefill new prompts -> decode one token

The completions of one model form a batch. A prompt is prefilled once for its completions: later ones start with a copy of a
sibling's keys and values. The last live row moves into a finished row's place, so a batch shrinks without copying the other
rows. Workers, evaluation and serving share this code. An engine has one scheduler; the server has one for all versions.

Invariants: at most `SchedulerLimits.rows` completions are decoded, and their KV cache stays within `cache_bytes` whatever
their final lengths. A completion that exceeds `cache_bytes` by itself is decoded alone. A completion receives its tokens in
order. Not thread-safe. Left out: priorities; preemption, which is not needed, because memory for the full length is
reserved when a completion is scheduled.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.engine.rows import CachedRows, max_positions, token_bytes
from shoal.model import logprobs
from shoal.model.numerics import ROW_UNIT
from shoal.model.sampling import choose

LOGITS_BYTES = 64 << 20  # float32 logits in memory at once
CACHED = 16  # rows whose float32 logits a CPU processes together: this many fit its cache


@dataclass(frozen=True)
class SchedulerLimits:
    rows: int = 256  # completions decoded at once, over all models
    cache_bytes: int = 2 << 30  # KV cache of all rows
    join_tokens: int = 2048  # prompt tokens prefilled between two steps; a longer prompt is prefilled alone


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
        if not 0 <= self.seed < 1 << 64 or not (self.temperature == 0 or 0.01 <= self.temperature < math.inf):
            raise ValueError(
                f"seed {self.seed} must have at most 64 bits, and temperature {self.temperature} must be 0 or >= 0.01"
            )


class DecodeSequence(Protocol):
    """A completion and what its caller does with each token."""

    @property
    def model(self) -> Any: ...

    @property
    def request(self) -> DecodeRequest: ...

    @property
    def cancelled(self) -> bool: ...  # whether to drop it at the next step

    def on_prefill(self, hidden_LH: Tensor) -> None:
        """Receive the final hidden states of the prompt's positions. Called only with `request.echo`."""
        ...

    def position(self) -> int:
        """Return the next token's position in the completion."""
        ...

    def on_token(self, token: int, logprob: float, state_H: Tensor, logits_1V: Tensor) -> int | None:
        """Receive the sampled token, its logprob at the sampling temperature, and its hidden state and logits.

        Return the token to append: the sampled token or another. Return None to end the completion here.
        """
        ...


def cache_bytes(model: Any, sequences: Sequence[DecodeSequence]) -> int:
    """Return the KV cache size of these completions at full length. Buffers are rectangles: rows by positions."""
    longest = max(max_positions(len(seq.request.prompt), seq.request.max_tokens) for seq in sequences)
    return token_bytes(model) * len(sequences) * longest


def _models(sequences: Iterable[DecodeSequence]) -> Iterable[Any]:
    """Return each model of the sequences once."""
    return {id(seq.model): seq.model for seq in sequences}.values()


class Scheduler:
    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.waiting: deque[DecodeSequence] = deque()
        self.scheduled: list[DecodeSequence] = []  # to prefill in this step; after a failure some may be in a batch too
        self.batches: list[DecodeBatch] = []  # one per model in use

    @property
    def live(self) -> int:
        return sum(len(batch.live) for batch in self.batches)

    def unfinished(self) -> list[DecodeSequence]:
        """Return all waiting, scheduled and running completions, even after a failed step."""
        sequences = [*self.waiting, *self.scheduled, *self._running()]
        return list({id(seq): seq for seq in sequences}.values())

    def add(self, new: Iterable[DecodeSequence]) -> None:
        self.waiting.extend(new)

    def step(self) -> list[DecodeSequence]:
        """Decode one token for each completion. Return the completions that received one or were cancelled."""
        touched = self.drop_cancelled()
        self.schedule()
        self.prefill()
        for batch in self.batches:
            touched += batch.decode()
        self.batches = [batch for batch in self.batches if batch.live]
        return touched

    def drop_cancelled(self) -> list[DecodeSequence]:
        """Drop cancelled completions and return them."""
        cancelled, waiting = list[DecodeSequence](), deque[DecodeSequence]()
        for seq in self.waiting:  # read `cancelled` once, because other threads set it
            (cancelled if seq.cancelled else waiting).append(seq)
        self.waiting = waiting
        for batch in self.batches:
            cancelled += batch.drop_cancelled()
        return cancelled

    def schedule(self) -> None:
        """Schedule waiting completions, first come first served, within the limits."""
        room = self.limits.join_tokens
        prompts = {(id(seq.model), seq.request.prompt) for seq in self._running()}
        while self.waiting:
            first = self.waiting[0]
            prompt = (id(first.model), first.request.prompt)
            new = 0 if prompt in prompts and not first.request.echo else len(first.request.prompt)
            if (self.scheduled and new > room) or not self._fits(first):
                break
            room -= new
            prompts.add(prompt)
            self.scheduled.append(self.waiting.popleft())

    def prefill(self) -> None:
        """Add the scheduled completions to their models' batches."""
        for model in _models(self.scheduled):
            batch = next((batch for batch in self.batches if batch.model is model), None)
            if batch is None:
                batch = DecodeBatch(model)
                self.batches.append(batch)
            batch.prefill([seq for seq in self.scheduled if seq.model is model])
        self.scheduled = []

    def _running(self) -> list[DecodeSequence]:
        return [seq for batch in self.batches for seq in batch.live]

    def _fits(self, new: DecodeSequence) -> bool:
        running = [*self.scheduled, *self._running()]
        if len(running) >= self.limits.rows:
            return False
        allocated = {id(batch.model): batch.rows.allocated_bytes for batch in self.batches}
        used = 0
        for model in _models([new, *running]):
            needed = cache_bytes(model, [seq for seq in [new, *running] if seq.model is model])
            used += max(needed, 0 if model is new.model else allocated.get(id(model), 0))
        return used <= self.limits.cache_bytes or not running


class DecodeBatch:
    """All completions of one model that are being decoded, one per row of its KV cache."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows = CachedRows(model)
        self.live: list[DecodeSequence] = []  # by row
        self.prompt_H: list[Tensor] = []  # by row: the hidden state of its prompt's last token
        self.hidden_BH: Tensor | None = None  # from which each row's next token is sampled

    @torch.inference_mode()
    def prefill(self, new: Sequence[DecodeSequence]) -> None:
        """Add rows. Prefill only prompts that no live row has, and prompts to echo."""
        known = {seq.request.prompt: row for row, seq in enumerate(self.live)}
        groups: dict[tuple[int, ...], list[DecodeSequence]] = {}
        for seq in new:
            groups.setdefault(seq.request.prompt, []).append(seq)
        fresh = [
            prompt for prompt, group in groups.items() if prompt not in known or any(seq.request.echo for seq in group)
        ]
        for prompt, hidden_LH in zip(fresh, self.rows.join(fresh) if fresh else [], strict=True):
            known[prompt] = len(self.live)
            self._add(groups[prompt][:1], [hidden_LH[-1].clone()])
            for seq in groups[prompt]:
                if seq.request.echo:
                    seq.on_prefill(hidden_LH)
        copies = [(known[prompt], seq) for prompt, group in groups.items() for seq in group[prompt in fresh :]]
        if copies:
            self.rows.fork([source for source, _ in copies], [len(seq.request.prompt) for _, seq in copies])
            self._add([seq for _, seq in copies], [self.prompt_H[source] for source, _ in copies])

    def _add(self, new: Sequence[DecodeSequence], states: Sequence[Tensor]) -> None:
        self.live += new
        self.prompt_H += states
        before = [] if self.hidden_BH is None else [self.hidden_BH]
        self.hidden_BH = torch.cat([*before, torch.stack(list(states))])

    @torch.inference_mode()
    def drop_cancelled(self) -> list[DecodeSequence]:
        """Drop cancelled completions and return them."""
        cancelled = [seq.cancelled for seq in self.live]  # read each once, because other threads set it
        dropped = [seq for seq, gone in zip(self.live, cancelled, strict=True) if gone]
        self._keep([row for row, gone in enumerate(cancelled) if not gone])
        return dropped

    @torch.inference_mode()
    def decode(self) -> list[DecodeSequence]:
        """Sample a token for each row and compute the next states of unfinished rows. Return all that received a token."""
        touched = list(self.live)
        tokens = self._sample()
        kept = self._keep([row for row, token in enumerate(tokens) if token is not None])
        if self.live:
            self.hidden_BH = self.rows.step(torch.tensor([tokens[row] for row in kept]))
        return touched

    def _sample(self) -> list[int | None]:
        """Sample one token per row, by its seed and temperature, in chunks of rows to bound the logits' memory."""
        tokens: list[int | None] = [None] * len(self.live)
        by_temperature: dict[float, list[int]] = {}
        for row, seq in enumerate(self.live):
            by_temperature.setdefault(seq.request.temperature, []).append(row)
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        step = max(1, LOGITS_BYTES // (4 * vocabulary * ROW_UNIT)) * ROW_UNIT
        for temperature, rows in by_temperature.items():
            for start in range(0, len(rows), step):
                chunk = rows[start : start + step]
                for row, token in zip(chunk, self._sample_chunk(chunk, temperature), strict=True):
                    tokens[row] = token
        return tokens

    def _sample_chunk(self, rows: Sequence[int], temperature: float) -> list[int | None]:
        assert self.hidden_BH is not None
        hidden_NH = self.hidden_BH if len(rows) == len(self.live) else self.hidden_BH[torch.tensor(rows)]
        logits_NV = logprobs.logits(self.model, hidden_NH)
        sequences = [self.live[row] for row in rows]
        seeds = [seq.request.seed for seq in sequences]
        positions = [seq.position() for seq in sequences]
        size = CACHED if logits_NV.device.type == "cpu" else len(rows)
        parts = [
            choose(logits_NV[i : i + size], seeds[i : i + size], positions[i : i + size], temperature)
            for i in range(0, len(rows), size)
        ]
        tokens_N, logprobs_N = (torch.cat(part) for part in zip(*parts, strict=True))
        states_NH = hidden_NH.to("cpu", torch.bfloat16, copy=True)
        sampled = zip(sequences, tokens_N.tolist(), logprobs_N.tolist(), strict=True)
        return [
            seq.on_token(token, logprob, states_NH[n], logits_NV[n : n + 1])
            for n, (seq, token, logprob) in enumerate(sampled)
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
