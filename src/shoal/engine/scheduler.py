"""Which completions are decoded now. Places of finished ones are filled at once, whoever asked for the next.

    add -> step: drop who was cancelled -> take rows in, first come first served -> one step of each model's batch

One implementation for workers, evaluation and serving: the engine has one, and the server one for all versions in memory.
Invariant: at most `Limits.rows` are decoded, and their keys and values stay within `Limits.cache_bytes` whatever their
lengths become; a completion that is larger than that alone is decoded alone.
Called by the torch engine and by `serve`. Not thread-safe. Left out: preemption, priorities.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.engine.batch import Batch, Drawn
from shoal.engine.rows import most_positions, token_bytes


@dataclass(frozen=True)
class Limits:
    rows: int = 256  # completions decoded at once, of all models together
    cache_bytes: int = 2 << 30  # keys and values of all rows
    join_tokens: int = 2048  # of prompts, taken in between two steps; one longer prompt is taken alone


def cache_bytes(model: Any, rows: Sequence[Drawn]) -> int:
    """What the keys and values of these completions take at full length. Buffers are rectangles: rows by positions."""
    longest = max(most_positions(len(one.ask.prompt), one.ask.max_tokens) for one in rows)
    return token_bytes(model) * len(rows) * longest


class Scheduler:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: deque[Drawn] = deque()
        self.batches: list[Batch] = []
        self._joining: list[Drawn] = []  # taken from the queue; some may be in a batch already

    @property
    def live(self) -> int:
        return sum(len(batch.live) for batch in self.batches)

    def everyone(self) -> list[Drawn]:
        """Whoever waits or is decoded, also after a step that failed."""
        found = [*self.waiting, *self._joining, *(one for batch in self.batches for one in batch.live)]
        return list({id(one): one for one in found}.values())

    def add(self, new: Iterable[Drawn]) -> None:
        self.waiting.extend(new)

    def step(self) -> list[Drawn]:
        """One token for each completion that is decoded. Returns those that got one or were cancelled."""
        touched, waiting = list[Drawn](), deque[Drawn]()
        for one in self.waiting:  # each is asked once: other threads cancel meanwhile
            (touched if one.cancelled else waiting).append(one)
        self.waiting = waiting
        for batch in self.batches:
            touched += batch.leave()
        self._take_in()
        for batch in self.batches:
            touched += batch.step()
        self.batches = [batch for batch in self.batches if batch.live]
        return touched

    def _take_in(self) -> None:
        """Move what waits into batches, as far as the limits allow."""
        taken = self._joining
        room = self.limits.join_tokens
        prompts = {(id(batch.model), one.ask.prompt) for batch in self.batches for one in batch.live}
        while self.waiting:
            first = self.waiting[0]
            prompt = (id(first.model), first.ask.prompt)
            new = 0 if prompt in prompts and not first.ask.echo else len(first.ask.prompt)
            if (taken and new > room) or not self._fits(first, taken):
                break
            room -= new
            prompts.add(prompt)
            taken.append(self.waiting.popleft())
        for model in {id(one.model): one.model for one in taken}.values():
            batch = next((batch for batch in self.batches if batch.model is model), None)
            if batch is None:
                batch = Batch(model)
                self.batches.append(batch)
            batch.join([one for one in taken if one.model is model])
        self._joining = []

    def _fits(self, new: Drawn, taken: Sequence[Drawn]) -> bool:
        there = [*taken, *(one for batch in self.batches for one in batch.live)]
        if len(there) >= self.limits.rows:
            return False
        held = {id(batch.model): batch.rows.held_bytes for batch in self.batches}
        used = 0
        for model in {id(one.model): one.model for one in [new, *there]}.values():
            needed = cache_bytes(model, [one for one in [new, *there] if one.model is model])
            used += max(needed, 0 if model is new.model else held.get(id(model), 0))
        return used <= self.limits.cache_bytes or not there
