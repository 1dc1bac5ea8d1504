"""The servers of a downloader: which one to use next, and what to do when it fails.

`Sources.ranked` ranks the servers by their `Standing`, and each request goes to the first. Silent, backed-off and
suspect servers come last, in this order. The others come first, in random order weighted by expected throughput. The
randomness spreads the load and keeps measurements fresh. (For shards a relay passes its own order.)

    questions (lists, manifests)   go to few servers, and to one more each time a server fails, has nothing or is silent
    shards                         go to one server at a time; if it fails, is silent or too slow, the next one continues
                                   at the same byte. A server is left out after MAX_STRIKES wrong copies, or if it still
                                   lacks the shard after CATCHES_UP_IN_S

Invariant: a shard is delivered correct or not at all. Its sink's `done` is called once, after the hash matched. Every
query returns, for each queried server, an answer or the reason why there is none. A download without progress ends with
an error, whatever servers send.
Paper: INTELLECT-2 (arXiv 2505.07291): servers are chosen by success rate times bandwidth, with a healing factor.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import Any, Protocol, TypeVar

import aiohttp

from shoal.shardcast.fetch import BadData, FetchError, NotHeld, SourceError, first_error
from shoal.shardcast.fetch.source import Access, Incoming, Sink, Source, open_session
from shoal.shardcast.manifest import Part, ShardEntry

T = TypeVar("T")
Question = Callable[[Source], Coroutine[Any, Any, T]]
OnFailure = Callable[[SourceError], None]
Order = Callable[[ShardEntry, list[Source]], list[Source]]  # the servers for a shard, best first

HEDGE_S, LONGEST_HEDGE_S = 0.2, 2.0  # limits of the delay before a request also goes to a second server (hedging)
SILENCE = 0.9  # a server that has not answered within this fraction of hedge_s counts as silent
NOTHING_YET = 10  # once a server has answered that it has nothing, wait this multiple of hedge_s for the others
CATCHES_UP_IN_S = 1.5  # a server without the shard is retried for this long
MAX_STRIKES = 3  # after this many wrong copies of a shard, a server is not asked for it again
BROKE_OFF_S = 1.0  # after this silence in the middle of a shard, the transfer counts as broken off
FAR_SLOWER, LEAST_S = 4.0, 0.5  # an attempt may take FAR_SLOWER times as long as from other servers, plus LEAST_S


def loop_time() -> float:
    """Return the event loop's time, which is time.monotonic() unless a test replaces the loop."""
    return asyncio.get_running_loop().time()


class Silent(SourceError):
    """The server sent nothing for a while. It may be far away, or still be waiting for the shard."""


class Sources:
    def __init__(
        self,
        access: Access,
        session: aiohttp.ClientSession,
        urls: Sequence[str],
        *,
        on_failure: OnFailure,
    ) -> None:
        self.access, self.session = access, session
        self.patience_s = access.limits.patience_s
        self.on_failure = on_failure
        self.sources: list[Source] = []
        self._gone: list[Source] = []
        self._took_s: deque[float] = deque(maxlen=50)  # durations of recent shards
        self.use(urls)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        access: Access,
        urls: Sequence[str],
        *,
        on_failure: OnFailure = lambda error: None,
    ) -> AsyncIterator[Sources]:
        """Open one session to the servers at these URLs."""
        async with open_session(access) as session:
            yield cls(access, session, urls, on_failure=on_failure)

    def use(self, urls: Sequence[str]) -> None:
        """Replace the set of servers. Shards in transfer continue."""
        known = {source.url: source for source in [*self.sources, *self._gone]}
        wanted = dict.fromkeys(url.rstrip("/") for url in urls)
        self.sources = [known[url] if url in known else Source(self.session, url, self.access) for url in wanted]
        self._gone = [source for url, source in known.items() if url not in wanted]

    @property
    def received_bytes(self) -> int:
        return sum(self.by_source().values())

    def by_source(self) -> dict[str, int]:
        """Return the bytes received from each URL that has sent any."""
        everyone = [*self.sources, *self._gone]
        return {source.url: source.received_bytes for source in everyone if source.received_bytes}

    def ranked(self, among: Sequence[Source], strikes: Counter[Source] | None = None) -> list[Source]:
        """Rank these servers, best first. `strikes` says how often each has sent wrong bytes of the shard."""
        best_Bps = max((source.standing.speed_Bps() or 0.0 for source in among), default=0.0) or 1.0

        def key(source: Source) -> tuple[bool, float, bool, int, float]:
            standing = source.standing
            speed_Bps = standing.speed_Bps() or best_Bps  # an unmeasured server is assumed to be as fast as the best
            weight = max(standing.success() * speed_Bps / best_Bps, 1e-9)
            # Each server's chance to be first is proportional to its weight (Efraimidis and Spirakis 2006).
            draw = -math.log(1 - random.random()) / weight
            struck = strikes[source] if strikes else 0
            return standing.suspect(), standing.rest_s(), standing.silent(), struck, draw

        return sorted(among, key=key)

    async def ask(self, question: Question[T], *, enough: int = 1) -> tuple[dict[Source, T], dict[str, str]]:
        """Query `enough` servers. Query one more each time a server fails, has nothing (NotHeld or None) or is silent
        for `hedge_s`. Stop when `enough` servers have given a result. If no server answers, query the suspect servers.
        Return the answer of each server, and the reason for each URL whose answer is missing. A
        silent server delays only the first question, by `hedge_s`."""
        reasons: dict[str, str] = {}
        answers: dict[Source, T] = {}
        suspects = [source for source in self.sources if source.standing.suspect()]
        for group in ([source for source in self.sources if source not in suspects], suspects):
            answers, more = await self._ask(self.ranked(group), question, enough)
            reasons |= more
            if answers:
                break
        return answers, reasons

    async def ask_all(
        self, question: Question[T], *, among: Sequence[Source]
    ) -> tuple[dict[Source, T], dict[str, str]]:
        """Query these servers, except silent and suspect ones. After the first answer, wait `hedge_s` for more."""
        good = [source for source in among if not source.standing.suspect()] or list(among)
        awake = [source for source in good if not source.standing.silent()] or good
        return await self._ask(awake, question, len(awake))

    def hedge_s(self) -> float:
        """Return the delay before hedging a request: three times the usual latency, within limits."""
        known_s = [seconds for source in self.sources if (seconds := source.standing.answer_s()) is not None]
        return min(max(HEDGE_S, 3 * median(known_s)), LONGEST_HEDGE_S) if known_s else HEDGE_S

    async def _ask(
        self, waiting: list[Source], question: Question[T], enough: int
    ) -> tuple[dict[Source, T], dict[str, str]]:
        """Query `enough` servers, in this order, and the next one each time one fails, has nothing or is silent."""
        hedge_s = self.hedge_s()
        requests: dict[asyncio.Task[T], tuple[Source, float]] = {}
        answers: dict[Source, T] = {}
        reasons: dict[str, str] = {}
        pending: set[asyncio.Task[T]] = set()
        more = enough  # how many to query now
        try:
            while True:
                for source in waiting[:more]:
                    task = asyncio.create_task(question(source))
                    requests[task] = source, loop_time()
                    pending.add(task)
                waiting = waiting[more:]
                results = sum(answer is not None for answer in answers.values())
                if results >= enough or not pending:
                    break
                timeout_s: float | None = hedge_s
                if not (waiting or results):  # if the servers that answered have nothing, give the others more time
                    timeout_s = NOTHING_YET * hedge_s if answers else None
                done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if not done and (results or not waiting):
                    break
                more = 0 if done else 1
                for task in done:
                    source, started_s = requests[task]
                    try:
                        answers[source] = task.result()
                        more += answers[source] is None
                    except SourceError as error:
                        reasons[source.url] = error.reason
                        self.on_failure(error)
                        more += 1
                        if not isinstance(error, NotHeld):
                            continue
                    source.standing.answered(loop_time() - started_s)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        for source, started_s in (requests[task] for task in pending):
            reasons[source.url] = "no answer in time, others answered"
            if loop_time() - started_s >= SILENCE * hedge_s:
                source.standing.unanswered()
        return answers, reasons

    async def shard(
        self, version: int, part: Part, incoming: Incoming, *, deadline_s: float, order: Order | None = None
    ) -> None:
        """Fetch one shard. Try one server after another until `Source.shard` has received and verified it.

        `deadline_s` is a time of the event loop. `order` replaces the ranking.
        Raise FetchError, which names every server tried."""
        shard, limits = incoming.shard, self.access.limits
        strikes: Counter[Source] = Counter()
        absent_since_s: dict[Source, float] = {}
        reasons: dict[str, str] = {}
        quiet_s = self._quiet_s()
        began_s = loop_time()

        def usable() -> list[Source]:
            return [
                source
                for source in (self.sources if order is None else order(shard, self.sources))
                if strikes[source] < MAX_STRIKES
                and loop_time() - absent_since_s.get(source, math.inf) < CATCHES_UP_IN_S
            ]

        while candidates := usable():
            if order is None:
                source = self.ranked(candidates, strikes)[0]
            else:
                # Of the servers with the fewest strikes, take the first in order.
                source = min(candidates, key=lambda candidate: strikes[candidate])
            if (rest_s := source.standing.rest_s()) >= deadline_s - loop_time():
                break
            await asyncio.sleep(rest_s)
            # Give up on a silent server only if another one may have the shard. A relay never gives up, because its
            # siblings may still be receiving the shard.
            alone = len(candidates) == 1
            silence_s = math.inf if alone or order is not None else quiet_s
            try:
                await self._try(source, version, part, incoming, deadline_s, silence_s, alone=alone)
                self._took_s.append(loop_time() - began_s)
                return
            except SourceError as error:
                reasons[error.url] = error.reason
                if isinstance(error, BadData):
                    strikes[source] += 1
                if isinstance(error, NotHeld):
                    absent_since_s.setdefault(source, loop_time())
                else:
                    absent_since_s.clear()  # others may catch up while this server backs off
                if isinstance(error, Silent):
                    source.standing.unanswered()
                    quiet_s *= 2  # be more patient with the next server, because all may be slow to start
                elif error.retry_after_s or isinstance(error, NotHeld):  # a server that lags behind has not failed
                    source.standing.rest(error.retry_after_s or limits.first_rest_s / 2)
                else:
                    source.standing.failed(limits.first_rest_s, limits.longest_rest_s)
                self.on_failure(error)
        why = "; ".join(f"{url}: {reason}" for url, reason in reasons.items()) or "no server was available"
        ending = "the deadline passed" if candidates else "every server was tried"
        raise FetchError(
            f"shard {shard.index} ({part}) of version {version} could not be fetched: {ending} ({why}); "
            "add a relay, or raise the timeout if these servers are only slow"
        )

    async def _try(
        self,
        source: Source,
        version: int,
        part: Part,
        incoming: Incoming,
        deadline_s: float,
        silence_s: float,
        *,
        alone: bool,
    ) -> None:
        """Request the shard once. Give up if the server sends no byte for `silence_s`, or (unless `alone`) hangs,
        trickles or is far slower than others. Keep the bytes that it sent."""
        started_s, had_bytes = loop_time(), incoming.size_bytes
        left_s = deadline_s - started_s
        enough_s = FAR_SLOWER * self._usual_s(source, incoming.shard.size_bytes - had_bytes) + LEAST_S
        limit_s = left_s if alone else min(self.patience_s, left_s / 2, enough_s)
        what = f"shard {incoming.shard.index}"
        sending = asyncio.ensure_future(source.shard(version, part, incoming))
        try:
            seen_bytes, moved_s = had_bytes, started_s
            while not sending.done():
                quiet_s = silence_s if incoming.size_bytes == had_bytes else max(silence_s, BROKE_OFF_S)
                ends_s = min(started_s + limit_s, moved_s + quiet_s)
                await asyncio.wait([sending], timeout=max(ends_s - loop_time(), 0.0))
                now_s = loop_time()
                if incoming.size_bytes != seen_bytes:
                    seen_bytes, moved_s = incoming.size_bytes, now_s
                elif not sending.done() and now_s >= moved_s + quiet_s:
                    raise Silent(source.url, f"sent nothing of {what} for {now_s - moved_s:.1f} s")
                if not sending.done() and now_s >= started_s + limit_s:
                    break
            if sending.done():
                sending.result()
                source.standing.delivered(incoming.size_bytes - had_bytes, loop_time() - started_s)
                return
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        if enough_s <= limit_s and incoming.size_bytes > had_bytes:
            source.standing.slowed(incoming.size_bytes - had_bytes, limit_s)
            rest_s: float | None = self.access.limits.first_rest_s
        else:
            # Be more patient from now on, because our own link may be the slow one.
            self.patience_s, rest_s = max(self.patience_s, 2 * limit_s), None
        raise SourceError(source.url, f"{what} took longer than {limit_s:.1f} s", retry_after_s=rest_s)

    def _quiet_s(self) -> float:
        """Return the silence after which a shard's next server is tried: at least twice the usual time of a shard."""
        return max(self.hedge_s(), 2 * median(self._took_s) if self._took_s else 0.0)

    def _usual_s(self, source: Source, size_bytes: int) -> float:
        """Return the time that other servers would take for `size_bytes`; infinity if their speed is unknown."""
        known_Bps = [speed for other in self.sources if other is not source and (speed := other.standing.speed_Bps())]
        return size_bytes / median(known_Bps) if known_Bps else math.inf


class ShardSink(Sink, Protocol):
    """Store one shard."""

    def done(self) -> None:
        """Note that the shard is written and verified. This is called once."""

    def close(self) -> None: ...


POLL_S = 0.05
LEAST_BPS = 1024  # a slower download counts as one without progress
COUNTED_COPIES = 4  # only this many copies of a shard count as progress, because more would only repeat wrong bytes


class StreamDownload:
    """Download the shards of one stream, several at a time."""

    def __init__(
        self,
        sources: Sources,
        version: int,
        part: Part,
        queues: Sequence[Sequence[ShardEntry]],
        sink: Callable[[ShardEntry], ShardSink],
        *,
        parallel: int,
        deadline_s: float,
        stall_s: float,
        order: Order | None = None,
        on_shard: Callable[[ShardEntry], None] = lambda shard: None,
    ) -> None:
        """Fetch `parallel` shards of each of the `queues` at once, in order. `deadline_s` is a time of the event loop.
        The download fails if for `stall_s` no shard is finished and the speed stays below LEAST_BPS. `order` replaces
        the ranking of servers."""
        self.sources, self.version, self.part, self.sink = sources, version, part, sink
        self.queues = [deque(queue) for queue in queues]
        self.parallel, self.deadline_s, self.stall_s = parallel, deadline_s, stall_s
        self.order, self.on_shard = order, on_shard
        self._running: list[Incoming] = []
        self._left = sum(map(len, queues))
        self._done_bytes = 0

    async def run(self) -> None:
        """Download until all shards are stored. Raise FetchError, and errors of the sinks."""
        try:
            async with asyncio.TaskGroup() as group:
                workers = [group.create_task(self._drain(queue)) for queue in self.queues for _ in range(self.parallel)]
                watching = group.create_task(self._watch())
                await asyncio.wait(workers)
                watching.cancel()
        except ExceptionGroup as errors:
            raise first_error(errors) from errors

    async def _drain(self, queue: deque[ShardEntry]) -> None:
        while queue:
            await self._fetch(queue.popleft())

    async def _fetch(self, shard: ShardEntry) -> None:
        sink = self.sink(shard)
        incoming = Incoming(shard, sink)
        self._running.append(incoming)
        try:
            await self.sources.shard(self.version, self.part, incoming, deadline_s=self.deadline_s, order=self.order)
            sink.done()
        finally:
            self._running.remove(incoming)
            sink.close()
        self._left -= 1
        self._done_bytes += _moved_bytes(incoming)
        self.on_shard(shard)

    async def _watch(self) -> None:
        """Raise FetchError if the download makes no progress for `stall_s`."""
        left, had_bytes, since_s = self._left, 0, loop_time()
        while True:
            await asyncio.sleep(POLL_S)
            moved_bytes = self._done_bytes + sum(map(_moved_bytes, self._running))
            if self._left != left or moved_bytes >= had_bytes + LEAST_BPS * self.stall_s:
                left, had_bytes, since_s = self._left, moved_bytes, loop_time()
            elif loop_time() - since_s > self.stall_s:
                urls = ", ".join(source.url for source in self.sources.sources)
                raise FetchError(
                    f"version {self.version} made no progress for {self.stall_s:.0f} s, with {left} of its shards missing; "
                    f"{urls} send less than {LEAST_BPS} bytes a second: add a relay"
                )


def _moved_bytes(incoming: Incoming) -> int:
    """Return the bytes that count as progress. Endless repeats of a wrong shard do not count."""
    return min(incoming.arrived_bytes, COUNTED_COPIES * incoming.shard.size_bytes)
