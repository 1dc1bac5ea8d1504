"""All servers that a downloader may use: which one to ask next, and what to do when it fails.

A client draws a server at random, in proportion to its expected throughput (see `Standing`), and not simply the best one.
This spreads the load and keeps the figures fresh. A relay passes an order instead. A server that sends wrong bytes is
excluded for that shard after `strikes` tries, one that does not have it after a moment. One that is silent or refuses rests,
longer after each failure.
Invariant: a shard is delivered correct or not at all.
Called by relay and client. Paper: INTELLECT-2 (arXiv 2505.07291): success rate times bandwidth, with a healing factor.
"""

from __future__ import annotations

import asyncio
import math
import random
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import aiohttp

from shoal.shardcast.fetch.errors import BadData, FetchError, NotHeld, SourceError
from shoal.shardcast.fetch.reach import Reach
from shoal.shardcast.fetch.source import Incoming, Source, open_session
from shoal.shardcast.fetch.standing import Standing
from shoal.shardcast.format.manifest import Part, ShardEntry
from shoal.shardcast.format.newest import Newest, SignedNewest

T = TypeVar("T")
Order = Callable[[ShardEntry, list[Source]], list[Source]]  # the servers for a shard, best first
OnFailure = Callable[[SourceError], None]

CATCHES_UP_IN_S = 1.5  # a server that does not have a version yet
HEALTHY = 0.5  # success rate
FAR_SLOWER, LEAST_S = 4.0, 0.5  # limit of one try: multiple of what other servers take, plus a constant


@dataclass(frozen=True)
class Limits:
    """Timeouts of a downloader, in seconds."""

    connect_timeout_s: float = 5.0
    idle_timeout_s: float = 30.0  # until the next byte
    answer_timeout_s: float = 30.0  # for one listing or manifest
    patience_s: float = 15.0  # for one shard while another server could be asked instead; grows on slow links
    first_rest_s: float = 0.1  # of a server after a failure; doubles with each one
    longest_rest_s: float = 2.0


@dataclass
class Access:
    """How a downloader reaches servers, and what it has learned about them. Outlives single downloads."""

    public_key: str  # the learner's, ed25519, hex
    run: str | None = None
    limits: Limits = field(default_factory=Limits)
    token: Callable[[str], str] | None = None  # a reader's pass for the server at this URL, see `serve.passes`
    tls: ssl.SSLContext | None = None
    reach: Reach | None = None  # of addresses that others name; None: any, the user named them
    standings: dict[str, Standing] = field(default_factory=dict)  # by URL
    on_fetched: Callable[[dict[str, float], float], None] = lambda rates_Bps, behind_s: None  # speed by URL, age
    newest: Newest | None = None  # the origin's latest statement, of all that servers passed on

    def heard(self, signed: SignedNewest | None) -> None:
        newest = signed and signed.open(self.public_key, run=self.run)
        if newest and (self.newest is None or newest.as_of_s > self.newest.as_of_s):
            self.newest = newest

    @asynccontextmanager
    async def open(
        self,
        urls: Sequence[str],
        *,
        fallback: Sequence[str] = (),
        strikes: int = 3,
        on_failure: OnFailure = lambda error: None,
    ) -> AsyncIterator[Sources]:
        """The servers at these URLs, over one session that ends with the block. `fallback` servers are asked only while
        all others fail."""
        async with open_session(
            connect_timeout_s=self.limits.connect_timeout_s,
            idle_timeout_s=self.limits.idle_timeout_s,
            tls=self.tls,
            reach=self.reach,
        ) as session:
            yield Sources(self, session, urls, fallback=fallback, strikes=strikes, on_failure=on_failure)


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

    async def ask(
        self, question: Callable[[Source], Awaitable[T]], *, grace_s: float = 2.0
    ) -> tuple[dict[Source, T], dict[str, str]]:
        """Asks all servers at once, and the fallback if none answers. Returns the answers, and for each other URL the
        reason. After the first answer the rest have `grace_s`, so that a dead server does not delay every question by
        its timeout."""
        answers, reasons = await self._ask(self.sources, question, grace_s)
        if answers or not self.fallback:
            return answers, reasons
        answers, more = await self._ask(self.fallback, question, grace_s)
        return answers, reasons | more

    async def _ask(
        self, sources: Sequence[Source], question: Callable[[Source], Awaitable[T]], grace_s: float
    ) -> tuple[dict[Source, T], dict[str, str]]:
        asked = {asyncio.ensure_future(question(source)): source for source in sources}
        answers: dict[Source, T] = {}
        reasons = {source.url: "no answer in time, others answered" for source in sources}
        pending = set(asked)
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=grace_s if answers else None, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for task in done:
                    source = asked[task]
                    try:
                        answers[source] = task.result()
                        del reasons[source.url]
                    except SourceError as error:
                        reasons[source.url] = error.reason
                        self.on_failure(error)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return answers, reasons

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
        return failing or source.standing.success() < HEALTHY

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


def loop_time() -> float:
    """The event loop's time, which is time.monotonic() unless a test replaces the loop."""
    return asyncio.get_running_loop().time()
