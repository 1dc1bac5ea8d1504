"""Which completions are decoded now. Places of finished ones are filled at once, whoever asked for the next.

One implementation for workers, evaluation and serving: the engine has one, and the server one for all versions in memory.
Invariant: at most `SchedulerLimits.rows` are decoded, and their keys and values stay within its `cache_bytes` whatever
their lengths become; a completion that is larger than that alone is decoded alone.
Not thread-safe. Left out: priorities, and preemption: memory for the full length is reserved when a completion is scheduled.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.engine.batch import DecodeBatch, Decoding
from shoal.engine.rows import most_positions, token_bytes


@dataclass(frozen=True)
class SchedulerLimits:
    rows: int = 256  # completions decoded at once, of all models together
    cache_bytes: int = 2 << 30  # keys and values of all rows
    join_tokens: int = 2048  # of prompts, prefilled between two steps; one longer prompt is prefilled alone


def cache_bytes(model: Any, rows: Sequence[Decoding]) -> int:
    """What the keys and values of these completions take at full length. Buffers are rectangles: rows by positions."""
    longest = max(most_positions(len(one.ask.prompt), one.ask.max_tokens) for one in rows)
    return token_bytes(model) * len(rows) * longest


class Scheduler:
    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.waiting: deque[Decoding] = deque()
        self.scheduled: list[Decoding] = []  # to be prefilled in this step; some may be in a batch already
        self.batches: list[DecodeBatch] = []  # one for each model that is decoded

    @property
    def live(self) -> int:
        return sum(len(batch.live) for batch in self.batches)

    def everyone(self) -> list[Decoding]:
        """Whoever waits or is decoded, also after a step that failed."""
        everyone = [*self.waiting, *self.scheduled, *self._running()]
        return list({id(one): one for one in everyone}.values())

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
        """Finish who was cancelled. Return them."""
        cancelled, waiting = list[Decoding](), deque[Decoding]()
        for one in self.waiting:  # each is asked once: other threads cancel meanwhile
            (cancelled if one.cancelled else waiting).append(one)
        self.waiting = waiting
        for batch in self.batches:
            cancelled += batch.drop_cancelled()
        return cancelled

    def schedule(self) -> None:
        """Take what waits, first come first served, as far as the limits allow."""
        room = self.limits.join_tokens
        prompts = {(id(one.model), one.ask.prompt) for one in self._running()}
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
        """Add what was scheduled to the batches of its models."""
        for model in {id(one.model): one.model for one in self.scheduled}.values():
            batch = next((batch for batch in self.batches if batch.model is model), None)
            if batch is None:
                batch = DecodeBatch(model)
                self.batches.append(batch)
            batch.prefill([one for one in self.scheduled if one.model is model])
        self.scheduled = []

    def _running(self) -> list[Decoding]:
        return [one for batch in self.batches for one in batch.live]

    def _fits(self, new: Decoding) -> bool:
        there = [*self.scheduled, *self._running()]
        if len(there) >= self.limits.rows:
            return False
        held = {id(batch.model): batch.rows.held_bytes for batch in self.batches}
        used = 0
        for model in {id(one.model): one.model for one in [new, *there]}.values():
            needed = cache_bytes(model, [one for one in [new, *there] if one.model is model])
            used += max(needed, 0 if model is new.model else held.get(id(model), 0))
        return used <= self.limits.cache_bytes or not there
