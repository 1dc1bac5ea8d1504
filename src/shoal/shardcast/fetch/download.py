"""Fetches the shards of one stream, several at a time, in order. Late shards are requested a second time elsewhere.

    await Download(sources, version, part, sink, ...).run()          a relay, which adds the shards
    await fetch_stream(sources, offer, part, into, ...)              a client; the version may still be growing

A copy of a late shard goes to memory and wins if it is complete and correct first. So one slow or silent server delays the
end only a little.
Invariant: a sink's `done` is called after the shard's hash matched, and never twice. Every shard is one that the version's
signed manifest names, though the manifest may grow meanwhile. A download that does not move ends with an error, whatever
servers send (see `Movement`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial as bind
from math import inf
from statistics import median
from typing import Protocol

from shoal.shardcast.fetch import FetchError, ReplacedError, first_error
from shoal.shardcast.fetch.cache import Partial
from shoal.shardcast.fetch.plan import offered
from shoal.shardcast.fetch.source import Incoming, Offer, Sink, Source
from shoal.shardcast.fetch.sources import Sources, loop_time
from shoal.shardcast.manifest import Part, ShardEntry

LOOK_AGAIN_S = 0.05
LEAST_BPS = 1024  # below that a download does not move
TIMES = 4  # the bytes of a shard that count as movement, as a multiple of its size: it may come from several servers
LATE_S = 1.0  # a shard is late after so long without a byte, or after twice the usual time


class ShardSink(Sink, Protocol):
    """Stores one shard."""

    def begun(self) -> Iterator[bytes]:
        """The bytes that an earlier process left, from the shard's start."""

    def done(self) -> None:
        """Called when all of it was written and verified."""

    def close(self) -> None: ...


@dataclass(eq=False)
class _Running:
    shard: ShardEntry
    sink: ShardSink
    incoming: Incoming
    begun_bytes: int  # what an earlier process left
    seen_bytes: int
    moved_s: float  # when it last grew
    started_s: float
    task: asyncio.Task[None]
    source: Source | None = None
    copied: bool = False
    overtaken: bool = False
    received: list[Incoming] = field(default_factory=list)  # `incoming` and its copies

    @property
    def moved_bytes(self) -> int:
        return min(sum(incoming.arrived_bytes for incoming in self.received), TIMES * self.shard.size_bytes)


class Movement:
    """Whether a download moves: another shard, or LEAST_BPS, within each `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._shards, self._bytes, self._since_s = 0, 0, loop_time()

    def stalled(self, shards: int, size_bytes: int) -> bool:
        """Whether it has not moved for `limit_s`, now that so many shards were named or done, and bytes moved."""
        if shards != self._shards or size_bytes >= self._bytes + LEAST_BPS * self.limit_s:
            self._shards, self._bytes, self._since_s = shards, size_bytes, loop_time()
        return loop_time() - self._since_s > self.limit_s


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
        """`deadline_s` is in the event loop's time; `order` replaces the random choice of servers."""
        self.sources, self.version, self.part, self.sink = sources, version, part, sink
        self.parallel, self.deadline_s, self.order, self.on_shard = parallel, deadline_s, order, on_shard
        self._queue: deque[ShardEntry] = deque()
        self._all_named = False
        self._running: list[_Running] = []
        self._took_s: deque[float] = deque(maxlen=50)
        self._done_bytes = 0
        self.named = self.done = 0  # shards

    def add(self, shards: Iterable[ShardEntry], *, last: bool) -> None:
        """Adds shards to fetch; `last`: there will be no more."""
        before = len(self._queue)
        self._queue.extend(shards)
        self.named += len(self._queue) - before
        self._all_named = last

    @property
    def moved_bytes(self) -> int:
        """The bytes that came, except those of a shard that comes again and again and is never right."""
        return self._done_bytes + sum(running.moved_bytes for running in self._running)

    async def run(self) -> None:
        """Returns when all shards are stored. Raises FetchError, and what a sink raises."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.parallel):
                    group.create_task(self._run_worker())
        except ExceptionGroup as errors:
            raise first_error(errors) from errors

    async def _run_worker(self) -> None:
        while True:
            if self._queue:
                await self._fetch(self._queue.popleft())
            elif late := self._late():
                await self._fetch_copy(late)
            elif self._running or not self._all_named:
                if loop_time() > self.deadline_s:
                    raise FetchError(f"version {self.version} was not completed in time; check that its origin is up")
                await self._pause()
            else:
                return

    async def _pause(self) -> None:
        """Until a shard arrives, at most LOOK_AGAIN_S."""
        if running := [running.task for running in self._running]:
            await asyncio.wait(running, timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _fetch(self, shard: ShardEntry) -> None:
        sink = self.sink(shard)
        incoming = Incoming(shard, sink)
        for data in sink.begun():
            incoming.resume(data)
        if incoming.size_bytes == shard.size_bytes and not incoming.matches():
            incoming.restart()  # damaged on disk, or of another version
        task = asyncio.ensure_future(self._first(incoming, sink))
        begun_bytes, now_s = incoming.size_bytes, loop_time()
        running = _Running(shard, sink, incoming, begun_bytes, begun_bytes, now_s, now_s, task, received=[incoming])
        self._running.append(running)
        try:
            await self._hedge(running)
            await task
        except asyncio.CancelledError:
            worker = asyncio.current_task()
            if not running.overtaken or (worker and worker.cancelling()):
                raise
        finally:
            task.cancel()
            self._running.remove(running)
            sink.close()
        self.done += 1
        self._done_bytes += running.moved_bytes
        if begun_bytes < shard.size_bytes:
            self._took_s.append(loop_time() - running.started_s)
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

    async def _hedge(self, running: _Running) -> None:
        """Asks another server, too, if the first one sends no byte for a while. Relays wait instead: their siblings may
        still be receiving the shard, and a second copy would cost the origin's uplink."""
        if self.order is not None or not self._all_named or len(self.sources.sources) < 2:
            return
        usual_s = 2 * median(self._took_s) if self._took_s else 0.0
        await asyncio.wait([running.task], timeout=max(self.sources.hedge_s(), usual_s))
        if running.task.done() or running.copied or running.incoming.size_bytes != running.begun_bytes:
            return
        silent = running.source
        await self._fetch_copy(running)
        if silent and running.overtaken and running.incoming.size_bytes == running.begun_bytes:
            silent.standing.unanswered()

    def _late(self) -> _Running | None:
        if not self._all_named or len(self.sources.sources) < 2:
            return None
        now_s = loop_time()
        usual_s = max(LATE_S, 2 * median(self._took_s)) if self._took_s else inf
        for running in self._running:
            if running.incoming.size_bytes != running.seen_bytes:
                running.seen_bytes, running.moved_s = running.incoming.size_bytes, now_s
        late = [
            running
            for running in self._running
            if not running.copied and (now_s - running.moved_s > LATE_S or now_s - running.started_s > usual_s)
        ]
        return min(late, key=lambda running: running.started_s, default=None)

    async def _fetch_copy(self, late: _Running) -> None:
        """Fetches a copy from another server; the first complete one wins."""
        late.copied = True
        copy = _Memory(late.shard.size_bytes)
        copying_of = Incoming(late.shard, copy)
        late.received.append(copying_of)
        copying = asyncio.ensure_future(
            self.sources.shard(
                self.version,
                self.part,
                copying_of,
                deadline_s=min(self.deadline_s, loop_time() + self.sources.patience_s),
                order=self.order,
                avoid=late.source,
            )
        )
        had_bytes = late.incoming.size_bytes
        try:
            while not (copying.done() or late.task.done()):
                await asyncio.wait([copying, late.task], timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
                arrived_bytes = late.incoming.size_bytes
                if had_bytes == late.begun_bytes and max(had_bytes, copying_of.size_bytes) < arrived_bytes:
                    late.copied = (
                        arrived_bytes == late.shard.size_bytes
                    )  # it was only slow to begin; it may become late again
                    return
            if not copying.done():
                return  # the first request was faster
            copying.result()
        except FetchError:
            return  # the first request continues
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


GROWN_AGAIN_S = 0.2
STALL_S = 60.0


async def fetch_stream(
    sources: Sources, offer: Offer, part: Part, into: Partial, *, parallel: int, deadline_s: float
) -> Offer:
    """Fetches the shards that `into` lacks. Returns the last manifest. Raises FetchError, ReplacedError, OSError."""
    download = Download(sources, offer[1].version, part, into.sink, parallel=parallel, deadline_s=deadline_s)
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(download.run())
            stream, movement = offer[1].streams[part], Movement(STALL_S)
            download.add(stream.entries(), last=stream.complete)
            while not running.done():
                await asyncio.wait([running], timeout=GROWN_AGAIN_S)
                if not stream.complete:
                    offer = await _grown(sources, offer)
                    stream = offer[1].streams[part]
                    download.add(stream.entries()[download.named :], last=stream.complete)
                if movement.stalled(download.named + download.done, download.moved_bytes):
                    raise FetchError(_stalled(sources, offer[1].version, download))
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return offer


def _stalled(sources: Sources, version: int, download: Download) -> str:
    if download.done == download.named:
        return f"version {version} is incomplete and has not grown for {STALL_S:.0f} s; check its origin"
    urls = ", ".join(source.url for source in [*sources.sources, *sources.fallback])
    return (
        f"version {version} made no progress for {STALL_S:.0f} s, with {download.named - download.done} of its shards "
        f"missing; {urls} send less than {LEAST_BPS} bytes a second: add a relay"
    )


async def _grown(sources: Sources, offer: Offer) -> Offer:
    answers, _ = await sources.ask(bind(offered, version=offer[1].version, digest=None))
    stated = sources.access.newest
    offers = [answer for answer in answers.values() if answer and not (stated and stated.outdates(answer[1]))]
    if any(answer[1].replaces(offer[1]) for answer in offers):
        raise ReplacedError(f"version {offer[1].version} was replaced while it was fetched; fetch again")
    offers = [answer for answer in offers if answer[1].extends(offer[1])]
    return max([offer, *offers], key=lambda o: len(o[1].content.shards))
