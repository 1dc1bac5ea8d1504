"""All servers that a downloader may use: which one to ask next, and what to do when it fails.

Questions (lists, manifests) go to few servers, never to all: to another one when one fails, has nothing or is silent. One
that gave a bad answer is asked for a while only where no other answers.
For a shard, a client draws a server at random, in proportion to its expected throughput (see `Standing`), and not simply
the best one. This spreads the load and keeps the figures fresh. A relay passes an order instead. A server that sends wrong
bytes is excluded for that shard after `strikes` tries, one that does not have it after a moment. One that is silent or
refuses rests, longer after each failure.
Invariant: a shard is delivered correct or not at all. Every server that was asked a question has an answer or a reason.
Paper: INTELLECT-2 (arXiv 2505.07291): success rate times bandwidth, with a healing factor.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import TypeVar

import aiohttp

from shoal.shardcast.fetch import BadData, FetchError, NotHeld, SourceError
from shoal.shardcast.fetch.source import Access, Incoming, Source, Standing, open_session
from shoal.shardcast.manifest import Part, ShardEntry

T = TypeVar("T")
Question = Callable[[Source], Awaitable[T]]
OnFailure = Callable[[SourceError], None]

SILENCE = 0.9  # of hedge_s without an answer counts as silence
NOTHING_YET = 10  # times hedge_s: how long the rest may take after others answered that they have nothing


async def ask_few(
    waiting: list[Source], question: Question[T], enough: int, *, hedge_s: float, on_failure: OnFailure
) -> tuple[dict[Source, T], dict[str, str]]:
    """Asks `enough` servers, in this order, and the next one each time one fails, has nothing or is silent for `hedge_s`.

    Returns the answers, and for each other URL that was asked the reason.
    """
    asked: dict[asyncio.Task[T], tuple[Source, float]] = {}
    answers: dict[Source, T] = {}
    reasons: dict[str, str] = {}
    more = enough  # how many to ask now
    pending: set[asyncio.Task[T]] = set()
    try:
        while True:
            for source in waiting[:more]:
                task = asyncio.create_task(_answer(question, source))
                asked[task] = source, loop_time()
                pending.add(task)
            waiting = waiting[more:]
            given = sum(answer is not None for answer in answers.values())
            if given >= enough or not pending:
                break
            if waiting or given:
                timeout_s: float | None = hedge_s
            else:  # some may have answered that they have nothing: the rest, who may have it, get longer
                timeout_s = NOTHING_YET * hedge_s if answers else None
            done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done and (given or not waiting):
                break
            more = 0 if done else 1
            for task in done:
                source, asked_s = asked[task]
                try:
                    answers[source] = task.result()
                    more += answers[source] is None
                except SourceError as error:
                    reasons[source.url] = error.reason
                    on_failure(error)
                    more += 1
                    if not isinstance(error, NotHeld):
                        continue
                source.standing.answered(loop_time() - asked_s)
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    for source, asked_s in (asked[task] for task in pending):
        reasons[source.url] = "no answer in time, others answered"
        if loop_time() - asked_s >= SILENCE * hedge_s:
            source.standing.unanswered()
    return answers, reasons


async def _answer(question: Callable[[Source], Awaitable[T]], source: Source) -> T:
    return await question(source)


def loop_time() -> float:
    """The event loop's time, which is time.monotonic() unless a test replaces the loop."""
    return asyncio.get_running_loop().time()


Order = Callable[[ShardEntry, list[Source]], list[Source]]  # the servers for a shard, best first

CATCHES_UP_IN_S = 1.5  # a server that does not have a version yet
HEALTHY = 0.5  # success rate
HEDGE_S, LONGEST_HEDGE_S = 0.2, 2.0  # until another server is asked the same
FAR_SLOWER, LEAST_S = 4.0, 0.5  # limit of one try: multiple of what other servers take, plus a constant


class Sources:
    def __init__(
        self,
        access: Access,
        session: aiohttp.ClientSession,
        urls: Sequence[str],
        *,
        fallback: Sequence[str],
        strikes: int,
        on_failure: OnFailure,
    ) -> None:
        self.access, self.session = access, session
        self.strikes = strikes
        self.patience_s = access.limits.patience_s
        self.on_failure = on_failure
        self.sources: list[Source] = []
        self._gone: list[Source] = []
        self._failures: Counter[Source] = Counter()  # in a row
        self._rest_until_s: dict[Source, float] = {}
        self.fallback = [self._source(url.rstrip("/")) for url in fallback]
        self.use(urls)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        access: Access,
        urls: Sequence[str],
        *,
        fallback: Sequence[str] = (),
        strikes: int = 3,
        on_failure: OnFailure = lambda error: None,
    ) -> AsyncIterator[Sources]:
        """The servers at these URLs, over one session that ends with the block. `fallback` servers are asked only while
        all others fail."""
        async with open_session(
            connect_timeout_s=access.limits.connect_timeout_s,
            idle_timeout_s=access.limits.idle_timeout_s,
            tls=access.tls,
            reach=access.reach,
        ) as session:
            yield cls(access, session, urls, fallback=fallback, strikes=strikes, on_failure=on_failure)

    def use(self, urls: Sequence[str]) -> None:
        """Replaces the set of servers; shards in flight continue."""
        known = {source.url: source for source in [*self.sources, *self._gone]}
        wanted = dict.fromkeys(url.rstrip("/") for url in urls)
        self.sources = [known[url] if url in known else self._source(url) for url in wanted]
        self._gone = [source for url, source in known.items() if url not in wanted]

    @property
    def shard_bytes(self) -> int:
        """Bytes of shards received from all servers."""
        return sum(source.shard_bytes for source in [*self.sources, *self._gone, *self.fallback])

    @property
    def received_bytes(self) -> int:
        return sum(self.by_source().values())

    def by_source(self) -> dict[str, int]:
        """All bytes received, by URL."""
        everyone = [*self.sources, *self._gone, *self.fallback]
        return {source.url: source.received_bytes for source in everyone if source.received_bytes}

    async def ask(self, question: Question[T], *, enough: int = 1) -> tuple[dict[Source, T], dict[str, str]]:
        """Asks `enough` servers, drawn by standing, and another one each time one fails, has nothing (NotHeld or None) or
        is silent for `hedge_s`, until `enough` have given something. The fallback is asked if none answers, and then those
        that gave a bad answer not long ago. Returns the answers, and for each other URL that was asked the reason. So a
        silent server delays a question by `hedge_s`, and only the first one: the next ones go to others."""
        servers, reasons = self._by_standing(), dict[str, str]()
        suspects = [source for source in [*servers, *self.fallback] if source.standing.suspect()]
        for group in (servers, self.fallback, suspects):
            waiting = [source for source in group if group is suspects or source not in suspects]
            answers, more = await self._ask(waiting, question, enough)
            reasons |= more
            if answers:
                break
        return answers, reasons

    async def ask_all(
        self, question: Question[T], *, among: Sequence[Source]
    ) -> tuple[dict[Source, T], dict[str, str]]:
        """Asks these servers at once, except those that were silent or gave a bad answer not long ago. After the first
        answer the rest have `hedge_s`."""
        good = [source for source in among if not source.standing.suspect()] or list(among)
        awake = [source for source in good if not source.standing.silent()] or good
        return await self._ask(awake, question, len(awake))

    def hedge_s(self) -> float:
        """After so long without an answer another server is asked, too: several times what answers usually take."""
        known_s = [seconds for source in self.sources if (seconds := source.standing.answer_s()) is not None]
        return min(max(HEDGE_S, 3 * median(known_s)), LONGEST_HEDGE_S) if known_s else HEDGE_S

    async def _ask(
        self, waiting: list[Source], question: Question[T], enough: int
    ) -> tuple[dict[Source, T], dict[str, str]]:
        return await ask_few(waiting, question, enough, hedge_s=self.hedge_s(), on_failure=self.on_failure)

    def _by_standing(self) -> list[Source]:
        """All servers in the order in which questions go to them: drawn by expected throughput, silent ones last."""
        best_Bps = max((source.standing.speed_Bps() or 0.0 for source in self.sources), default=0.0) or 1.0

        def draw(source: Source) -> tuple[bool, bool, float]:
            weight = max(source.standing.success() * (source.standing.speed_Bps() or best_Bps) / best_Bps, 1e-9)
            # With these exponents each is first in proportion to its weight (Efraimidis and Spirakis 2006).
            return source.standing.silent(), self.resting(source), -(math.log(1 - random.random()) / weight)

        return sorted(self.sources, key=draw)

    async def shard(
        self,
        version: int,
        part: Part,
        incoming: Incoming,
        *,
        deadline_s: float,
        order: Order | None = None,
        avoid: Source | None = None,
        on_try: Callable[[Source], None] = lambda source: None,
    ) -> None:
        """Fetches one shard and verifies it. `deadline_s` is in the event loop's time. `order` replaces the random choice.
        Raises FetchError that names every server that was tried."""
        shard = incoming.shard
        bad: Counter[Source] = Counter()
        absent_since_s: dict[Source, float] = {}
        reasons: dict[str, str] = {}

        def may_have_it(source: Source) -> bool:
            absent_s = loop_time() - absent_since_s.get(source, math.inf)
            return bad[source] < self.strikes and absent_s < CATCHES_UP_IN_S

        while usable := [source for source in self._askable(shard, order) if may_have_it(source)]:
            others = [source for source in usable if source is not avoid] or usable
            source = self._pick(others, bad, ordered=order is not None)
            if not await self._rested(source, deadline_s):
                break
            on_try(source)
            try:
                usual_s = self._usual_s(source, shard.size_bytes - incoming.size_bytes)
                enough_s = FAR_SLOWER * usual_s + LEAST_S
                await self._try(source, version, part, incoming, deadline_s, enough_s, alone=len(usable) == 1)
                return
            except SourceError as error:
                reasons[error.url] = error.reason
                if isinstance(error, BadData):
                    bad[source] += 1
                elif isinstance(error, NotHeld):
                    absent_since_s.setdefault(source, loop_time())
                else:
                    absent_since_s.clear()  # others may catch up while this one rests
                self._rest(source, error)
                self.on_failure(error)
        why = "; ".join(f"{url}: {reason}" for url, reason in reasons.items()) or "no server was available"
        ending = "the deadline passed" if usable else "every server was tried"
        raise FetchError(
            f"shard {shard.index} ({part}) of version {version} could not be fetched, {ending} ({why}); "
            "add a relay, or raise the timeout if these servers are only slow"
        )

    def resting(self, source: Source) -> bool:
        """Whether it failed recently. Not having something yet does not count."""
        failing = self._failures[source] > 0 and self._rest_until_s.get(source, 0.0) > loop_time()
        return failing or source.standing.success() < HEALTHY or source.standing.silent()

    async def _try(
        self,
        source: Source,
        version: int,
        part: Part,
        incoming: Incoming,
        deadline_s: float,
        enough_s: float,
        *,
        alone: bool,
    ) -> None:
        """One attempt. A server that hangs or trickles gets all remaining time only if there is no other. One that takes
        longer than `enough_s` is abandoned; the bytes it sent are kept."""
        left_s = deadline_s - loop_time()
        limit_s = left_s if alone else min(self.patience_s, left_s / 2, enough_s)
        started_s, had_bytes = loop_time(), incoming.size_bytes
        try:
            async with asyncio.timeout(limit_s):
                await source.shard(version, part, incoming)
            self._failures[source] = 0
            source.standing.delivered(incoming.size_bytes - had_bytes, loop_time() - started_s)
        except TimeoutError as error:
            reason = f"shard {incoming.shard.index} took longer than {limit_s:.1f} s"
            if enough_s <= limit_s and incoming.size_bytes > had_bytes:
                source.standing.slowed(incoming.size_bytes - had_bytes, limit_s)
                raise SourceError(source.url, reason, retry_after_s=self.access.limits.first_rest_s) from error
            self.patience_s = max(self.patience_s, 2 * limit_s)  # our own link may be slow
            raise SourceError(source.url, reason) from error

    def _usual_s(self, source: Source, size_bytes: int) -> float:
        """The time that the other servers would take for `size_bytes`; infinity if their speed is unknown."""
        known_Bps = [speed for other in self.sources if other is not source and (speed := other.standing.speed_Bps())]
        return size_bytes / median(known_Bps) if known_Bps else math.inf

    def _askable(self, shard: ShardEntry, order: Order | None) -> list[Source]:
        everyone = [*self.sources, *self.fallback]
        return everyone if order is None else order(shard, everyone)

    def _pick(self, usable: list[Source], bad: Counter[Source], *, ordered: bool) -> Source:
        if ordered:
            return min(usable, key=lambda source: bad[source])  # the first in order
        now_s = loop_time()
        usable = [source for source in usable if not source.standing.avoided()] or usable
        if rested := [s for s in usable if s not in self.fallback and self._rest_until_s.get(s, 0.0) <= now_s]:
            usable = rested

        def trouble(source: Source) -> tuple[float, int]:
            return max(self._rest_until_s.get(source, 0.0) - now_s, 0.0), bad[source]

        least = min(trouble(source) for source in usable)
        free = [source for source in usable if trouble(source) == least]
        best_Bps = max((source.standing.speed_Bps() or 1.0 for source in free), default=1.0)  # assumed if unmeasured
        weights = [source.standing.success() * (source.standing.speed_Bps() or best_Bps) for source in free]
        return random.choices(free, weights)[0]

    def _rest(self, source: Source, error: SourceError) -> None:
        if error.retry_after_s is None and not isinstance(error, NotHeld):  # lagging behind is not a failure
            self._failures[source] += 1
            source.standing.failed()
        limits, doublings = self.access.limits, min(self._failures[source] - 1, 10)
        rest_s = error.retry_after_s or min(limits.first_rest_s * 2**doublings, limits.longest_rest_s)
        self._rest_until_s[source] = loop_time() + rest_s

    async def _rested(self, source: Source, deadline_s: float) -> bool:
        """Waits until the server may be asked again; returns False if that is after the deadline."""
        now_s = loop_time()
        ready_s = max(self._rest_until_s.get(source, 0.0), now_s)
        if ready_s >= deadline_s:
            return False
        await asyncio.sleep(ready_s - now_s)
        return True

    def _source(self, url: str) -> Source:
        return Source(
            self.session,
            url,
            self.access.standings.setdefault(url, Standing()),
            public_key=self.access.public_key,
            run=self.access.run,
            answer_timeout_s=self.access.limits.answer_timeout_s,
            token=self.access.token,
            reach=self.access.reach,
            heard=self.access.heard,
        )
