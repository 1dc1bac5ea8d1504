"""The client: brings a published version from the relays into a local folder.

Invariant: the folder `fetch` returns holds exactly the files the learner published: signature on the
manifest, hash on every shard as it streamed, hash of the whole read back from disk, and only then its name.
Called by workers and validators, from any thread that runs no event loop; several clients may share one
cache.
Left out: deltas, choosing relays by throughput (see failover.py), and waiting for a version that is not
published yet.
Paper: INTELLECT-2, SHARDCAST: clients fetch shards from relays in parallel, assemble and verify.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial as bind
from pathlib import Path

from .cache import Cache
from .failover import FetchError, Sources, open_sources
from .http_source import BadData, NotHeld, Offer, Source, SourceError
from .manifest import Manifest, ShardEntry
from .partial import Partial

OFFERS_TRIED = 5  # of one relay's newest versions, until a manifest verifies


@dataclass(frozen=True)
class FetchReport:
    version: int
    transferred_bytes: int  # over the network, manifests and refused shards included
    reused_bytes: int  # taken up from the cache or from an interrupted fetch
    seconds: float
    complaints: tuple[str, ...]  # the last one about each relay that failed or sent wrong data


@dataclass
class _Tally:
    transferred_bytes: int = 0
    reused_bytes: int = 0
    complaints: dict[str, str] = field(default_factory=dict)

    def note(self, error: SourceError) -> None:
        self.complaints[error.url] = str(error)


class Client:
    def __init__(
        self,
        urls: Sequence[str],
        *,
        public_key: str,
        cache: Path,
        run: str | None = None,
        keep: int = 2,
        parallel: int = 4,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 5.0,
        idle_timeout_s: float = 30.0,
        answer_timeout_s: float = 30.0,
        patience_s: float = 15.0,
    ) -> None:
        """`timeout_s` bounds a whole fetch until its bytes are here (not the check of the disk after it),
        `idle_timeout_s` the wait for the next byte, `answer_timeout_s` one list or manifest, `patience_s` one
        shard from one relay while there is another to ask (it grows if the link is slow)."""
        if not urls:
            raise FetchError("no relay is known; start one, or wait until one has joined")
        self.urls = list(urls)
        self.public_key, self.run = public_key, run
        self.cache = Cache(cache, public_key=public_key, run=run, keep=keep)
        self.parallel, self.timeout_s = parallel, timeout_s
        self.connect_timeout_s, self.idle_timeout_s = connect_timeout_s, idle_timeout_s
        self.answer_timeout_s, self.patience_s = answer_timeout_s, patience_s
        self.last_report: FetchReport | None = None

    def latest(self) -> Manifest | None:
        """The newest version any relay can prove; None if none is published.
        Raises FetchError if no relay answers."""
        offer = asyncio.run(self._find(None, None, _Tally(), time.monotonic() + self.timeout_s))
        return offer and offer[1]

    def fetch(self, version: int | None = None, *, digest: str | None = None) -> tuple[Path, Manifest]:
        """The folder of a version (None: the newest; `digest`: exactly that one) and its manifest.
        A version in the cache is returned without asking anyone when its number is given.
        Raises FetchError; the shards fetched until then are kept for the next call."""
        started_s, tally = time.monotonic(), _Tally()
        held = None if version is None else self.cache.held(version, digest)
        if held is None:
            held = self._bring(version, digest, tally, started_s + self.timeout_s)
        else:
            tally.reused_bytes = held[1].size_bytes
        self.last_report = FetchReport(
            version=held[1].version,
            transferred_bytes=tally.transferred_bytes,
            reused_bytes=tally.reused_bytes,
            seconds=time.monotonic() - started_s,
            complaints=tuple(tally.complaints.values()),
        )
        return held

    def _bring(
        self, version: int | None, digest: str | None, tally: _Tally, deadline_s: float
    ) -> tuple[Path, Manifest]:
        offer = asyncio.run(self._find(version, digest, tally, deadline_s))
        if offer is None:
            raise FetchError(f"no version is published yet at {', '.join(self.urls)}; try again later")
        signed, manifest = offer
        with self.cache.locked(deadline_s):
            if held := self.cache.held(manifest.version, manifest.digest):
                tally.reused_bytes = manifest.size_bytes
                return held
            partial = Partial(self.cache.path, signed, manifest)
            tally.reused_bytes = manifest.size_bytes - sum(shard.size_bytes for shard in partial.missing())
            asyncio.run(self._download(partial, tally, deadline_s))
            partial.verify()
            folder = partial.commit()
            self.cache.retain(manifest.version)
        return folder, manifest

    async def _find(self, version: int | None, digest: str | None, tally: _Tally, deadline_s: float) -> Offer | None:
        """The manifest to fetch: of `version`, else of the newest version any relay can prove."""
        async with self._sources(tally) as sources:
            try:
                async with asyncio.timeout_at(deadline_s):
                    answers, reasons = await sources.ask(bind(_offer, version=version, digest=digest))
            except TimeoutError as error:
                raise FetchError(f"no relay answered in time: {', '.join(self.urls)}; raise timeout_s") from error
        if not answers:
            wanted = "version list" if version is None else f"manifest of version {version}"
            why = "; ".join(f"{url}: {reason}" for url, reason in reasons.items())
            raise FetchError(f"no relay gave a valid {wanted} ({why}); check the URLs and that a relay is up")
        offers = [offer for offer in answers.values() if offer is not None]
        return max(offers, key=lambda offer: (offer[1].version, offer[1].created_s), default=None)

    async def _download(self, partial: Partial, tally: _Tally, deadline_s: float) -> None:
        queue = deque(partial.missing())
        async with self._sources(tally) as sources:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.parallel, len(queue))):
                        group.create_task(_take_shards(sources, partial, queue, deadline_s))
            except ExceptionGroup as errors:
                raise _first(errors) from errors

    @asynccontextmanager
    async def _sources(self, tally: _Tally) -> AsyncIterator[Sources]:
        async with open_sources(
            self.urls,
            public_key=self.public_key,
            run=self.run,
            connect_timeout_s=self.connect_timeout_s,
            idle_timeout_s=self.idle_timeout_s,
            answer_timeout_s=self.answer_timeout_s,
            patience_s=self.patience_s,
            on_failure=tally.note,
        ) as sources:
            try:
                yield sources
            finally:
                tally.transferred_bytes += sources.received_bytes


async def _take_shards(sources: Sources, partial: Partial, queue: deque[ShardEntry], deadline_s: float) -> None:
    while queue:
        shard = queue.popleft()
        await sources.shard(partial.manifest.version, shard, bind(partial.write, shard), deadline_s=deadline_s)
        partial.mark_done(shard)


async def _offer(source: Source, *, version: int | None, digest: str | None) -> Offer | None:
    """What one relay can prove; None if it says that nothing is published. Raises SourceError."""
    versions = [version] if version is not None else (await source.versions())[:OFFERS_TRIED]
    refused: SourceError | None = None
    for candidate in versions:
        try:
            offer = await source.manifest(candidate)
        except (BadData, NotHeld) as error:
            refused = error
            continue
        if digest in (None, offer[1].digest):
            return offer
        refused = BadData(source.url, f"version {candidate} is {offer[1].digest}, not {digest}")
    if refused is not None:
        raise refused
    return None


def _first(errors: ExceptionGroup) -> Exception:
    """The first failure of several tasks: a FetchError as it is, anything else unchanged too (it is a bug)."""
    return next((error for error in errors.exceptions if isinstance(error, FetchError)), errors.exceptions[0])
