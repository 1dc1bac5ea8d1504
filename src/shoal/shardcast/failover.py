"""All servers a downloader may use: which one to take next, and what to do when it fails.

Invariant: a shard comes back right or not at all. A source whose last shard failed is asked only when those
in good standing fail too. One that sends wrong bytes (or has none) is given up for that shard after `strikes`
tries; one that is silent or refuses rests a little longer each time and is asked again until the deadline,
since relays restart.
Called by the relay (its upstreams) and the client (its relays), which open their sources here.
Left out: choosing by measured throughput (that is `_pick` alone), and asking two at once for the last shards.
Paper: INTELLECT-2, SHARDCAST: clients spread their requests over relays and fail over.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from .http_source import BadData, NotHeld, Sink, Source, SourceError, open_session
from .manifest import ShardEntry

T = TypeVar("T")

FIRST_REST_S = 0.1
LONGEST_REST_S = 2.0


class FetchError(Exception):
    """What could not be fetched, from whom, and what to try."""


class Sources:
    def __init__(
        self,
        sources: Sequence[Source],
        *,
        strikes: int = 3,
        patience_s: float = 15.0,
        on_failure: Callable[[SourceError], None] = lambda error: None,
    ) -> None:
        self.sources = list(sources)
        self.strikes = strikes
        self.patience_s = patience_s  # for one shard, while another source could be asked instead; grows
        self.on_failure = on_failure
        self._busy: Counter[Source] = Counter()  # shards in flight
        self._failures: Counter[Source] = Counter()  # in a row
        self._rest_until_s: dict[Source, float] = {}

    @property
    def received_bytes(self) -> int:
        return sum(source.received_bytes for source in self.sources)

    async def ask(
        self, question: Callable[[Source], Awaitable[T]], *, grace_s: float = 2.0
    ) -> tuple[dict[Source, T], dict[str, str]]:
        """Asks all at once; returns the answers, and the reason per URL that gave none. Once one has answered
        the others get `grace_s` more, so a dead one does not slow every question down to its timeout."""
        asked = {asyncio.ensure_future(question(source)): source for source in self.sources}
        answers: dict[Source, T] = {}
        reasons = {source.url: "no answer while others answered" for source in self.sources}
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

    async def shard(self, version: int, shard: ShardEntry, sink: Sink, *, deadline_s: float) -> None:
        """Brings one verified shard into `sink`; `deadline_s` is in time.monotonic().
        Raises FetchError naming every source that was tried."""
        bad: Counter[Source] = Counter()
        absent: Counter[Source] = Counter()
        reasons: dict[str, str] = {}
        while usable := [s for s in self.sources if max(bad[s], absent[s]) < self.strikes]:
            source = self._pick(usable, bad)
            if not await self._rested(source, deadline_s):
                break
            try:
                await self._try(source, version, shard, sink, deadline_s, alone=len(usable) == 1)
                return
            except SourceError as error:
                reasons[error.url] = error.reason
                if isinstance(error, BadData):
                    bad[source] += 1
                elif isinstance(error, NotHeld):
                    absent[source] += 1
                else:
                    absent.clear()  # while we wait for this one, the others may catch up
                self._rest(source)
                self.on_failure(error)
        why = "; ".join(f"{url}: {reason}" for url, reason in reasons.items()) or "no source was free"
        ending = "no time is left" if usable else "every source was tried"
        raise FetchError(
            f"shard {shard.index} of version {version} could not be fetched, {ending} ({why}); "
            "add a relay, or raise the timeout if the ones named are merely slow"
        )

    async def _try(
        self, source: Source, version: int, shard: ShardEntry, sink: Sink, deadline_s: float, *, alone: bool
    ) -> None:
        """One attempt. A source that hangs or drips gets all the time left only while there is no other."""
        left_s = deadline_s - time.monotonic()
        limit_s = left_s if alone else min(self.patience_s, left_s / 2)
        self._busy[source] += 1
        try:
            async with asyncio.timeout(limit_s):
                await source.shard(version, shard, sink)
            self._failures[source] = 0
        except TimeoutError as error:
            self.patience_s = max(self.patience_s, 2 * limit_s)  # perhaps it is the link that is slow
            raise SourceError(source.url, f"shard {shard.index} was not done in {limit_s:.1f} s") from error
        finally:
            self._busy[source] -= 1

    def _pick(self, usable: list[Source], bad: Counter[Source]) -> Source:
        now_s = time.monotonic()

        def preference(source: Source) -> tuple[float, int, int, int]:
            rest_s = max(self._rest_until_s.get(source, 0.0) - now_s, 0.0)
            return rest_s, self._failures[source], bad[source], self._busy[source]

        return min(usable, key=preference)

    def _rest(self, source: Source) -> None:
        self._failures[source] += 1
        rest_s = min(FIRST_REST_S * 2 ** (self._failures[source] - 1), LONGEST_REST_S)
        self._rest_until_s[source] = time.monotonic() + rest_s

    async def _rested(self, source: Source, deadline_s: float) -> bool:
        """Waits until the source may be asked again; False if that is past the deadline."""
        now_s = time.monotonic()
        ready_s = max(self._rest_until_s.get(source, 0.0), now_s)
        if ready_s >= deadline_s:
            return False
        await asyncio.sleep(ready_s - now_s)
        return True


@asynccontextmanager
async def open_sources(
    urls: Sequence[str],
    *,
    public_key: str,
    run: str | None,
    connect_timeout_s: float,
    idle_timeout_s: float,
    answer_timeout_s: float,
    patience_s: float,
    strikes: int = 3,
    on_failure: Callable[[SourceError], None],
) -> AsyncIterator[Sources]:
    """The servers at these URLs, over one session that ends with the block. `idle_timeout_s` bounds the wait for the
    next byte, `answer_timeout_s` one list or manifest."""
    async with open_session(connect_timeout_s=connect_timeout_s, idle_timeout_s=idle_timeout_s) as session:
        sources = [
            Source(session, url, public_key=public_key, run=run, answer_timeout_s=answer_timeout_s) for url in urls
        ]
        yield Sources(sources, strikes=strikes, patience_s=patience_s, on_failure=on_failure)
