"""Fetches the shards of one stream, several at a time, in order; late ones a second time from elsewhere.

    await Download(sources, version, part, sink, ...).run()

End-game: when nothing is left to begin, a worker that is free asks another source for the shard that has been on its way
longest. That copy goes to memory, and replaces the first one if it is whole and right before it; so one slow relay
delays the end by little.
Invariant: a sink's `done` is called once a shard's hash matched, and never twice.
Called by client and relay.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Protocol

from shoal.shardcast.fetch.source import Incoming, Sink, Source
from shoal.shardcast.fetch.sources import FetchError, Sources
from shoal.shardcast.format.manifest import Part, ShardEntry

LOOK_AGAIN_S = 0.05
LATE_S = 1.0  # a shard is late if nothing came of it for so long, or after twice the time that others took


class ShardSink(Sink, Protocol):
    """Where one shard goes."""

    def begun(self) -> Iterator[bytes]:
        """What an earlier process left of it, from its start on."""

    def done(self) -> None:
        """All of it was written and is right."""

    def close(self) -> None: ...


@dataclass(eq=False)
class _Running:
    shard: ShardEntry
    sink: ShardSink
    incoming: Incoming
    seen_bytes: int
    moved_s: float  # when it was seen to grow
    started_s: float
    task: asyncio.Task[None]
    source: Source | None = None
    doubled: bool = False
    overtaken: bool = False


class Download:
    def __init__(
        self,
        sources: Sources,
        version: int,
        part: Part,
        sink: Callable[[ShardEntry], ShardSink],
        *,
        parallel: int,
        deadline_s: float,
        order: Callable[[ShardEntry, list[Source]], list[Source]] | None = None,
        on_shard: Callable[[ShardEntry], None] = lambda shard: None,
    ) -> None:
        """`deadline_s` is in time.monotonic(); `order` replaces the choice of sources by throughput."""
        self.sources, self.version, self.part, self.sink = sources, version, part, sink
        self.parallel, self.deadline_s, self.order, self.on_shard = parallel, deadline_s, order, on_shard
        self._queue: deque[ShardEntry] = deque()
        self._all_named = False
        self._running: list[_Running] = []
        self._took_s: deque[float] = deque(maxlen=50)

    def add(self, shards: Iterable[ShardEntry], *, last: bool) -> None:
        """More shards to fetch; `last`: no others will come."""
        self._queue.extend(shards)
        self._all_named = last

    async def run(self) -> None:
        """Returns when all are here. Raises FetchError, and what a sink raises."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.parallel):
                    group.create_task(self._work())
        except ExceptionGroup as errors:
            raise first_error(errors) from errors

    async def _work(self) -> None:
        while True:
            if self._queue:
                await self._bring(self._queue.popleft())
            elif late := self._late():
                await self._bring_again(late)
            elif self._running or not self._all_named:
                if time.monotonic() > self.deadline_s:
                    raise FetchError(f"version {self.version} was not named whole in time; is its origin still up?")
                await asyncio.sleep(LOOK_AGAIN_S)
            else:
                return

    async def _bring(self, shard: ShardEntry) -> None:
        sink = self.sink(shard)
        incoming = Incoming(shard, sink)
        for data in sink.begun():
            incoming.resume(data)
        if incoming.size_bytes == shard.size_bytes and not incoming.matches():
            incoming.restart()  # it rotted, or is of another version
        task = asyncio.ensure_future(self._first(incoming, sink))
        begun_bytes, now_s = incoming.size_bytes, time.monotonic()
        running = _Running(shard, sink, incoming, begun_bytes, now_s, now_s, task)
        self._running.append(running)
        try:
            await task
        except asyncio.CancelledError:
            worker = asyncio.current_task()
            if not running.overtaken or (worker and worker.cancelling()):
                raise
        finally:
            task.cancel()
            self._running.remove(running)
            sink.close()
        if begun_bytes < shard.size_bytes:
            self._took_s.append(time.monotonic() - running.started_s)
        self.on_shard(shard)

    async def _first(self, incoming: Incoming, sink: ShardSink) -> None:
        def note(source: Source) -> None:
            for running in self._running:
                if running.shard is incoming.shard:
                    running.source = source

        if incoming.size_bytes < incoming.shard.size_bytes:
            await self.sources.shard(
                self.version, self.part, incoming, deadline_s=self.deadline_s, order=self.order, on_try=note
            )
        sink.done()

    def _late(self) -> _Running | None:
        if not self._all_named or len(self.sources.sources) < 2:
            return None
        now_s = time.monotonic()
        usual_s = max(LATE_S, 2 * median(self._took_s)) if self._took_s else inf
        for running in self._running:
            if running.incoming.size_bytes != running.seen_bytes:
                running.seen_bytes, running.moved_s = running.incoming.size_bytes, now_s
        late = [
            running
            for running in self._running
            if not running.doubled and (now_s - running.moved_s > LATE_S or now_s - running.started_s > usual_s)
        ]
        return min(late, key=lambda running: running.started_s, default=None)

    async def _bring_again(self, late: _Running) -> None:
        """From a source that is not at it already; whoever is first wins."""
        late.doubled = True
        copy = _Memory(late.shard.size_bytes)
        copying = asyncio.ensure_future(
            self.sources.shard(
                self.version,
                self.part,
                Incoming(late.shard, copy),
                deadline_s=min(self.deadline_s, time.monotonic() + self.sources.patience_s),
                order=self.order,
                avoid=late.source,
            )
        )
        try:
            await asyncio.wait([copying, late.task], return_when=asyncio.FIRST_COMPLETED)
            if not copying.done():
                return  # the first one was faster
            copying.result()
        except FetchError:
            return  # the first one is still at it
        finally:
            copying.cancel()
        if late in self._running and not late.task.done():
            late.overtaken = True
            late.task.cancel()
            late.sink.restart()
            late.sink.write(0, bytes(copy.data))
            late.sink.done()


class _Memory:
    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)

    def write(self, offset_bytes: int, data: bytes) -> None:
        self.data[offset_bytes : offset_bytes + len(data)] = data

    def restart(self) -> None: ...


class ReplacedError(FetchError):
    """A version that was not whole is published anew."""


def first_error(errors: ExceptionGroup) -> Exception:
    """The first failure of several tasks: a FetchError as it is, anything else unchanged too (it is a bug)."""
    return next((error for error in errors.exceptions if isinstance(error, FetchError)), errors.exceptions[0])
