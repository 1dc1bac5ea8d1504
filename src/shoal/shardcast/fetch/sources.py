"""All servers a downloader may use: which one to take next, and what to do when it fails.

Which one: at random, in proportion to expected throughput (see `Standing`), never simply the best: so load spreads, and
what is known of each stays fresh. A relay has an order of its own. One that sends wrong bytes is given up for that shard
after `strikes` tries, one that has none after a moment; one that is silent or refuses rests a little longer each time.
Invariant: a shard comes back right or not at all.
Called by relay and client. Paper: INTELLECT-2 (arXiv 2505.07291): success rate times bandwidth, with a healing factor.
"""

from __future__ import annotations

import asyncio
import math
import random
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import aiohttp

from shoal.errors import ShoalError
from shoal.shardcast.fetch.source import (
    BadData,
    Complaint,
    Incoming,
    NotHeld,
    Source,
    SourceError,
    Standing,
    open_session,
)
from shoal.shardcast.format.manifest import Part, ShardEntry

T = TypeVar("T")
Order = Callable[[ShardEntry, list[Source]], list[Source]]  # those that may be asked for a shard, the first one first

FIRST_REST_S, LONGEST_REST_S = 0.1, 2.0
CATCHES_UP_IN_S = 1.5  # a server that does not know of a version yet, but the one asking does
WELL = 0.5  # success rate
FAR_SLOWER, LEAST_S = 4.0, 0.5  # times what others take, and a moment


class FetchError(ShoalError):
    """What could not be fetched, from whom, and what to try."""

    restart_helps = True  # relays come and go


@dataclass(frozen=True)
class Limits:
    """Waits of a downloader, in seconds."""

    connect_timeout_s: float = 5.0
    idle_timeout_s: float = 30.0  # for the next byte
    answer_timeout_s: float = 30.0  # for one list or manifest
    patience_s: float = 15.0  # for one shard, while another source could be asked instead; grows on slow links


@dataclass
class Access:
    """How a downloader reaches servers, what it has learnt of them, whom it tells. Outlives single downloads."""

    public_key: str  # the learner's, ed25519, hex
    run: str | None = None
    limits: Limits = field(default_factory=Limits)
    token: Callable[[], str] | None = None  # a reader's token, see `guard`
    tls: ssl.SSLContext | None = None
    standings: dict[str, Standing] = field(default_factory=dict)  # by URL
    on_fetched: Callable[[dict[str, float], float], None] = lambda rates_Bps, behind_s: None  # by URL; since published

    @asynccontextmanager
    async def open(
        self,
        urls: Sequence[str],
        *,
        fallback: Sequence[str] = (),
        strikes: int = 3,
        on_failure: Complaint = lambda error: None,
    ) -> AsyncIterator[Sources]:
        """The servers at these URLs, over one session that ends with the block. `fallback`: those to ask only while all
        others are in trouble."""
        async with open_session(
            connect_timeout_s=self.limits.connect_timeout_s,
            idle_timeout_s=self.limits.idle_timeout_s,
            tls=self.tls,
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
        on_failure: Complaint,
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
        """These and no others from now on; shards in flight go on."""
        known = {source.url: source for source in [*self.sources, *self._gone]}
        wanted = dict.fromkeys(url.rstrip("/") for url in urls)
        self.sources = [known[url] if url in known else self._source(url) for url in wanted]
        self._gone = [source for url, source in known.items() if url not in wanted]

    @property
    def shard_bytes(self) -> int:
        """Of shards alone."""
        return sum(source.shard_bytes for source in [*self.sources, *self._gone, *self.fallback])

    @property
    def received_bytes(self) -> int:
        return sum(self.by_source().values())

    def by_source(self) -> dict[str, int]:
        """Bytes received from each."""
        everyone = [*self.sources, *self._gone, *self.fallback]
        return {source.url: source.received_bytes for source in everyone if source.received_bytes}

    async def ask(
        self, question: Callable[[Source], Awaitable[T]], *, grace_s: float = 2.0
    ) -> tuple[dict[Source, T], dict[str, str]]:
        """Asks all at once, the fallback where none answers; returns the answers, and the reason per URL that gave none.
        Once one has answered the others get `grace_s` more, so a dead one does not slow every question down to its
        timeout."""
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
        reasons = {source.url: "no answer while others answered" for source in sources}
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
        """Brings one verified shard; `deadline_s` is in time.monotonic(). `order` replaces the choice by throughput.
        Raises FetchError naming every source that was tried."""
        shard = incoming.shard
        bad: Counter[Source] = Counter()
        absent_since_s: dict[Source, float] = {}
        reasons: dict[str, str] = {}

        def may_have_it(source: Source) -> bool:
            absent_s = time.monotonic() - absent_since_s.get(source, math.inf)
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
                    absent_since_s.setdefault(source, time.monotonic())
                else:
                    absent_since_s.clear()  # while we wait for this one, the others may catch up
                self._rest(source, error)
                self.on_failure(error)
        why = "; ".join(f"{url}: {reason}" for url, reason in reasons.items()) or "no source was free"
        ending = "no time is left" if usable else "every source was tried"
        raise FetchError(
            f"shard {shard.index} ({part}) of version {version} could not be fetched, {ending} ({why}); "
            "add a relay, or raise the timeout if the ones named are merely slow"
        )

    def resting(self, source: Source) -> bool:
        """Has it failed lately? That it does not have something yet is no failure."""
        ill = self._failures[source] > 0 and self._rest_until_s.get(source, 0.0) > time.monotonic()
        return ill or source.standing.success() < WELL

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
        """One attempt. A source that hangs or drips gets all the time left only while there is no other; one that takes
        more than `enough_s`, far more than others, is left, and what it sent is kept."""
        left_s = deadline_s - time.monotonic()
        limit_s = left_s if alone else min(self.patience_s, left_s / 2, enough_s)
        started_s, had_bytes = time.monotonic(), incoming.size_bytes
        try:
            async with asyncio.timeout(limit_s):
                await source.shard(version, part, incoming)
            self._failures[source] = 0
            source.standing.delivered(incoming.size_bytes - had_bytes, time.monotonic() - started_s)
        except TimeoutError as error:
            reason = f"shard {incoming.shard.index} was not done in {limit_s:.1f} s"
            if enough_s <= limit_s and incoming.size_bytes > had_bytes:
                source.standing.slowed(incoming.size_bytes - had_bytes, limit_s)
                raise SourceError(source.url, reason, retry_after_s=FIRST_REST_S) from error
            self.patience_s = max(self.patience_s, 2 * limit_s)  # perhaps it is the link that is slow
            raise SourceError(source.url, reason) from error

    def _usual_s(self, source: Source, size_bytes: int) -> float:
        """What the other sources would take for so much; infinity where nothing is known of them."""
        known_Bps = [speed for other in self.sources if other is not source and (speed := other.standing.speed_Bps())]
        return size_bytes / median(known_Bps) if known_Bps else math.inf

    def _askable(self, shard: ShardEntry, order: Order | None) -> list[Source]:
        everyone = [*self.sources, *self.fallback]
        return everyone if order is None else order(shard, everyone)

    def _pick(self, usable: list[Source], bad: Counter[Source], *, ordered: bool) -> Source:
        if ordered:
            return min(usable, key=lambda source: bad[source])  # the first of those
        now_s = time.monotonic()
        if untroubled := [s for s in usable if s not in self.fallback and self._rest_until_s.get(s, 0.0) <= now_s]:
            usable = untroubled

        def trouble(source: Source) -> tuple[float, int]:
            return max(self._rest_until_s.get(source, 0.0) - now_s, 0.0), bad[source]

        least = min(trouble(source) for source in usable)
        free = [source for source in usable if trouble(source) == least]
        hoped_Bps = max((source.standing.speed_Bps() or 1.0 for source in free), default=1.0)  # of one not tried lately
        weights = [source.standing.success() * (source.standing.speed_Bps() or hoped_Bps) for source in free]
        return random.choices(free, weights)[0]

    def _rest(self, source: Source, error: SourceError) -> None:
        if error.retry_after_s is None and not isinstance(error, NotHeld):  # that it is behind does not make it bad
            self._failures[source] += 1
            source.standing.failed()
        rest_s = error.retry_after_s or min(FIRST_REST_S * 2 ** min(self._failures[source] - 1, 10), LONGEST_REST_S)
        self._rest_until_s[source] = time.monotonic() + rest_s

    async def _rested(self, source: Source, deadline_s: float) -> bool:
        """Waits until the source may be asked again; False if that is past the deadline."""
        now_s = time.monotonic()
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
        )
