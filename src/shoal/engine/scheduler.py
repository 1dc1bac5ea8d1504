"""Schedule completions for continuous batching: a finished one's place is filled at once, from any caller's queue.

Workers, evaluation and serving share this implementation: an engine has one scheduler, the server one for all versions.
Invariant: at most `SchedulerLimits.rows` are decoded, and their KV cache stays within `cache_bytes` whatever their final
lengths; a completion that alone exceeds it is decoded alone.
Not thread-safe. Left out: priorities, and preemption: memory for the full length is reserved when a completion is scheduled.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.engine.batch import DecodeBatch, Decoding
from shoal.engine.rows import max_positions, token_bytes


@dataclass(frozen=True)
class SchedulerLimits:
    rows: int = 256  # completions decoded at once, of all models together
    cache_bytes: int = 2 << 30  # KV cache of all rows
    join_tokens: int = 2048  # prompt tokens prefilled between two steps; a longer prompt is prefilled alone


def cache_bytes(model: Any, rows: Sequence[Decoding]) -> int:
    """Return the KV cache size of these completions at full length. Buffers are rectangles: rows by positions."""
    longest = max(max_positions(len(seq.ask.prompt), seq.ask.max_tokens) for seq in rows)
    return token_bytes(model) * len(rows) * longest


class Scheduler:
    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.waiting: deque[Decoding] = deque()
        self.scheduled: list[Decoding] = []  # to prefill in this step; after a failure some may be in a batch already
        self.batches: list[DecodeBatch] = []  # one per model in use

    @property
    def live(self) -> int:
        return sum(len(batch.live) for batch in self.batches)

    def everyone(self) -> list[Decoding]:
        """Return all waiting, scheduled and running completions, even after a failed step."""
        everyone = [*self.waiting, *self.scheduled, *self._running()]
        return list({id(seq): seq for seq in everyone}.values())

    def add(self, new: Iterable[Decoding]) -> None:
        self.waiting.extend(new)

    def step(self) -> list[Decoding]:
        """Decode one token for each completion. Return those that got one or were cancelled."""
        touched = self.drop_cancelled()
        self.schedule()
        self.prefill()
        for batch in self.batches:
            touched += batch.decode()
        self.batches = [batch for batch in self.batches if batch.live]
        return touched

    def drop_cancelled(self) -> list[Decoding]:
        """Drop cancelled completions and return them."""
        cancelled, waiting = list[Decoding](), deque[Decoding]()
        for seq in self.waiting:  # read each once: other threads cancel concurrently
            (cancelled if seq.cancelled else waiting).append(seq)
        self.waiting = waiting
        for batch in self.batches:
            cancelled += batch.drop_cancelled()
        return cancelled

    def schedule(self) -> None:
        """Schedule waiting completions, first come first served, within the limits."""
        room = self.limits.join_tokens
        prompts = {(id(seq.model), seq.ask.prompt) for seq in self._running()}
        while self.waiting:
            first = self.waiting[0]
            prompt = (id(first.model), first.ask.prompt)
            new = 0 if prompt in prompts and not first.ask.echo else len(first.ask.prompt)
            if (self.scheduled and new > room) or not self._fits(first):
                break
            room -= new
            prompts.add(prompt)
            self.scheduled.append(self.waiting.popleft())

    def prefill(self) -> None:
        """Add the scheduled completions to their models' batches."""
        for model in {id(seq.model): seq.model for seq in self.scheduled}.values():
            batch = next((batch for batch in self.batches if batch.model is model), None)
            if batch is None:
                batch = DecodeBatch(model)
                self.batches.append(batch)
            batch.prefill([seq for seq in self.scheduled if seq.model is model])
        self.scheduled = []

    def _running(self) -> list[Decoding]:
        return [seq for batch in self.batches for seq in batch.live]

    def _fits(self, new: Decoding) -> bool:
        running = [*self.scheduled, *self._running()]
        if len(running) >= self.limits.rows:
            return False
        allocated = {id(batch.model): batch.rows.held_bytes for batch in self.batches}
        used = 0
        for model in {id(seq.model): seq.model for seq in [new, *running]}.values():
            needed = cache_bytes(model, [seq for seq in [new, *running] if seq.model is model])
            used += max(needed, 0 if model is new.model else allocated.get(id(model), 0))
        return used <= self.limits.cache_bytes or not running
