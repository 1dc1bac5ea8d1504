"""The client: download a version from relays into a local folder, in full or as deltas from a cached version.

    find      the newest version that servers offer or the cache has
    plan      the route with the fewest bytes: an anchor or a cached version, plus deltas
    fetch     each stream from several relays at once
    apply     the deltas to the starting version, in one pass if possible
    verify    every file against the signed manifest; then give the folder its final name

Invariant: the folder that `fetch` returns holds exactly the files that the learner published. A client never goes back to an
abandoned publication, or to an older version than it has, unless the caller requests that version.
Use a client from a thread without an event loop. Several clients may share a cache.
Paper: INTELLECT-2 (arXiv 2505.07291), SHARDCAST: clients fetch shards from relays in parallel, assemble and verify.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial as bind
from itertools import cycle
from pathlib import Path

from shoal.files import discard
from shoal.shardcast import delta
from shoal.shardcast.delta import DeltaError, Link
from shoal.shardcast.fetch import FetchError, NoRouteError, NotHeld, RefusedVersionError, SourceError, disk_errors
from shoal.shardcast.fetch.cache import RESULTS, Cache, Partial
from shoal.shardcast.fetch.download import Sources, StreamDownload
from shoal.shardcast.fetch.reach import proxy_for
from shoal.shardcast.fetch.source import Access, Arrival, Offer, Source
from shoal.shardcast.files import Cutter, LayoutError, alongside
from shoal.shardcast.manifest import FileEntry, Manifest, Newest, Part, Stream, latest

POLL_S = 0.2
STALL_S = 60.0
PARALLEL = 8  # shards fetched at a time
MIN_ANSWERS = 2  # servers queried for the newest version, because one may be behind
log = logging.getLogger(__name__)


@dataclass
class Progress:
    """Progress of the last fetch; other threads may read it."""

    doing: str = ""
    version: int | None = None
    total_bytes: int = 0  # size of the streams to fetch
    transferred_bytes: int = 0  # received over the network, including manifests and rejected shards
    by_source: dict[str, int] = field(default_factory=dict)
    reused_bytes: int = 0  # taken from the cache or from an interrupted fetch
    complaints: dict[str, str] = field(default_factory=dict)  # last failure of each server
    parent: int | None = None  # the cached version that the deltas started from

    def note(self, error: SourceError) -> None:
        self.complaints[error.url] = str(error)


class Client:
    def __init__(
        self,
        urls: Sequence[str],
        access: Access,
        cache: Path,
        *,
        relays: Callable[[], Sequence[str]] | None = None,
        keep: int = 2,
        timeout_s: float = 600.0,
        wait_s: float = 0.0,
    ) -> None:
        """`relays` returns URLs that replace `urls` during a fetch. `timeout_s` limits a fetch, except the final
        verification. `wait_s` limits the wait for a relay to answer, for a first version, or for a delta's parent."""
        if not urls:
            raise FetchError("no relay is known; start one, or wait until one joins")
        for url in urls if access.reach is None else ():
            proxy_for(url)  # raises FetchError; a URL that the pool announces fails alone, when it is used
        self.urls, self.relays = list(urls), relays
        self.access = access
        self.cache = Cache(cache, public_key=access.public_key, run=access.run, keep=keep)
        self.timeout_s, self.wait_s = timeout_s, wait_s
        self.progress = Progress()

    def latest(self) -> Manifest | None:
        """Return the newest version that the queried relays or the cache have; None if nothing is published.
        Raise FetchError if no relay answers."""

        async def ask() -> Offer | None:
            async with self._sources() as sources:
                now_s = time.monotonic()
                return await self._find(sources, None, None, now_s + self.wait_s, now_s + self.timeout_s)

        offer = asyncio.run(ask())
        return offer and offer[1]

    def fetch(self, version: int | None = None, *, digest: str | None = None) -> tuple[Path, Manifest]:
        """Fetch a version (default: the newest) and return its folder and manifest. It must have `digest`, if given.

        Query the servers even if the version is cached, because the origin may have started over. If both `version` and
        `digest` are given, return a cached version without a query. If no server answers, return a cached version.
        Raise FetchError; finished shards are kept for the next call."""
        started_s, self.progress = time.monotonic(), Progress()
        held = None if version is None or digest is None else self.cache.held(version, digest)
        if held is None:
            held = asyncio.run(self._fetch_version(version, digest, started_s + self.timeout_s))
        else:
            self.progress.reused_bytes = held[1].size_bytes
        progress, seconds = self.progress, time.monotonic() - started_s
        progress.version = held[1].version
        if progress.total_bytes:
            self.access.on_fetched(
                Arrival(
                    version=held[1].version,
                    size_bytes=progress.transferred_bytes,
                    took_s=seconds,
                    at_s=started_s + seconds,
                    rates_Bps={url: size_bytes / seconds for url, size_bytes in progress.by_source.items()},
                    behind_s=max(time.time() - held[1].created_s, 0.0),
                )
            )
        return held

    async def _fetch_version(self, version: int | None, digest: str | None, deadline_s: float) -> tuple[Path, Manifest]:
        began_s = time.monotonic()
        here = self.cache.held(version) if version is not None and digest is None else None
        wait_until_s = began_s if here else min(began_s + self.wait_s, deadline_s)
        async with self._sources() as sources:
            while True:
                try:
                    offer = await self._find(sources, version, digest, wait_until_s, deadline_s)
                except FetchError:
                    if here is None or Freshness(self.access, self.cache).outdated(here[1]):
                        raise
                    return here  # `progress.complaints` has the servers' errors
                if offer is None:
                    raise FetchError(
                        f"no version is published yet at {', '.join(self.urls)}; wait, or start the origin"
                    )
                if held := self._held(offer, digest):
                    return held  # without a lock, because the folder may be read-only
                with self.cache.locked(deadline_s):
                    try:
                        return await self._obtain(sources, offer, digest, deadline_s)
                    except NoRouteError as error:
                        if time.monotonic() >= wait_until_s:
                            raise FetchError(f"{error} (waited {time.monotonic() - began_s:.1f} s)") from error
                        self.progress.doing = f"waiting: {error}"
                    except FetchError:
                        if not await self._moved_on(sources, offer, version, digest, deadline_s):
                            raise
                await asyncio.sleep(POLL_S)  # wait for the parent or an anchor

    async def _moved_on(
        self, sources: Sources, started: Offer, version: int | None, digest: str | None, deadline_s: float
    ) -> bool:
        """Return whether servers now offer another version, or another publication of this one."""
        try:
            offer = await self._find(sources, version, digest, time.monotonic(), deadline_s)
        except FetchError:
            return False
        return offer is not None and offer[1] != started[1]

    async def _obtain(
        self, sources: Sources, offer: Offer, digest: str | None, deadline_s: float
    ) -> tuple[Path, Manifest]:
        """Fetch one version, under the cache's lock."""
        while True:
            if held := self._held(offer, digest):
                return held
            self.cache.check_free(offer[1].version)
            try:
                async with asyncio.timeout_at(deadline_s):
                    start, steps = await plan(self.cache, sources, offer)
            except TimeoutError as error:
                raise FetchError(
                    f"no relay gave the manifests that lead to version {offer[1].version} in time; raise timeout_s"
                ) from error
            done = await self._follow_plan(sources, start, steps, deadline_s)
            if done is not None:
                self.cache.retain(done[1].version)
                return done
            if start is None:
                raise FetchError(
                    f"version {offer[1].version} in {self.cache.path} does not match its manifest although every shard "
                    "did: this machine's disk or memory is faulty; the download was removed, fetch again"
                )
            self.cache.drop(start)  # its files are damaged, so plan without it

    def _held(self, offer: Offer, digest: str | None) -> tuple[Path, Manifest] | None:
        """Return the cached version unless the offer is newer."""
        held = self.cache.held(offer[1].version, digest)
        if held is None:
            return None
        if digest is None and offer[1].supersedes(held[1]):
            return None
        self.progress.reused_bytes = held[1].size_bytes
        return held

    async def _find(
        self, sources: Sources, version: int | None, digest: str | None, wait_until_s: float, deadline_s: float
    ) -> Offer | None:
        """Return the manifest of `version`, or by default of the newest version that a relay offers."""
        fresh = Freshness(self.access, self.cache)

        async def ask(number: int | None, enough: int) -> tuple[dict[Source, Offer | None], dict[str, str]]:
            async def question(source: Source) -> Offer | None:
                if number is not None and digest is None:
                    await source.listing()  # the statement in the list tells whether the version is outdated
                outdated = fresh.outdated if digest is None else lambda manifest: False
                return await offered(source, version=number, digest=digest, outdated=outdated)

            try:
                async with asyncio.timeout_at(deadline_s):
                    return await sources.ask(question, enough=enough)
            except TimeoutError as error:
                raise FetchError(f"no relay answered in time: {', '.join(self.urls)}; raise timeout_s") from error

        while True:
            answers, reasons = await ask(version, MIN_ANSWERS if version is None else 1)
            offers = [offer for offer in answers.values() if offer is not None]
            if offers or time.monotonic() >= wait_until_s:
                break
            self.progress.doing = "waiting for a version" if answers else "waiting for a relay"
            await asyncio.sleep(POLL_S)
        if not answers:
            wanted = "version list" if version is None else f"manifest of version {version}"
            why = "; ".join(f"{url}: {reason}" for url, reason in reasons.items())
            raise FetchError(f"no relay gave a valid {wanted} ({why}); check the URLs and that a relay is up")
        if version is None:
            return fresh.newest(offers)
        return max(offers, key=lambda offer: offer[1].created_s, default=None)

    async def _follow_plan(
        self, sources: Sources, start: int | None, steps: list[Step], deadline_s: float
    ) -> tuple[Path, Manifest] | None:
        """Fetch the streams and apply the deltas. Return None if the result does not match the manifest."""
        signed, manifest = steps[-1][0]
        self.progress.version = manifest.version
        self.progress.total_bytes = sum(offer[1].streams[part].size_bytes for offer, part in steps)
        folder = self.cache.folder(start) if start is not None else None
        links: list[Link] = []
        for offer, part in steps:
            self.progress.doing = f"fetching version {offer[1].version} ({part})"
            stream = offer[1].streams[part]
            files = offer[1].files if part == "full" else [FileEntry(path="delta", size_bytes=stream.size_bytes)]
            partial = Partial(self.cache.temporary(offer[1].version, part), files, stream)
            self.progress.reused_bytes += stream.size_bytes - sum(shard.size_bytes for shard in partial.missing)
            await StreamDownload(
                sources,
                offer[1].version,
                part,
                [partial.missing],
                partial.sink,
                parallel=PARALLEL,
                deadline_s=deadline_s,
                stall_s=STALL_S,
            ).run()
            if part == "full":
                folder = partial.files
            else:
                links.append(
                    Link(partial.files / "delta", tuple((file.path, file.size_bytes) for file in offer[1].files))
                )
        assert folder is not None
        written: Stream | None = None  # hashes computed while the files are written
        if links:
            made = self._apply(folder, links, manifest)
            if made is None:
                return None
            folder, written = made
        final = self.cache.add(folder, signed, manifest, written=written)
        if final is None:
            return None
        if start is not None:
            self.progress.parent = start
        return final, manifest

    def _apply(self, folder: Path, links: list[Link], manifest: Manifest) -> tuple[Path, Stream] | None:
        """Apply the deltas to `folder`. Return the new folder and its hashes; None if the deltas cannot be applied."""
        with disk_errors(self.cache.path):
            try:
                runs = delta.passes(links)
                for run, name in zip(runs, cycle(RESULTS)):
                    self.progress.doing = f"making version {manifest.version}"
                    result = self.cache.temporary(manifest.version, name)
                    discard(result)
                    hashing = Cutter(manifest.content.shard_size_bytes)
                    with alongside(hashing.add) as written:
                        delta.apply(folder, run, result, written)
                    if folder.name.startswith("."):
                        discard(folder)
                    folder = result
                content = hashing.finish(manifest.size_bytes)
            except (DeltaError, LayoutError):
                return None
        return folder, content

    @asynccontextmanager
    async def _sources(self) -> AsyncIterator[Sources]:
        progress = self.progress
        async with Sources.open(self.access, self.urls, on_failure=progress.note) as sources:

            async def report() -> None:
                while True:
                    if self.relays is not None and (urls := self.relays()):
                        sources.use(urls)
                    progress.by_source = sources.by_source()
                    progress.transferred_bytes = sources.received_bytes
                    await asyncio.sleep(0.1)

            reporting = asyncio.ensure_future(report())
            try:
                yield sources
            finally:
                reporting.cancel()
                progress.by_source, progress.transferred_bytes = sources.by_source(), sources.received_bytes


class Freshness:
    """Compare offers with the cache and the origin's statement. `here`, the newest cached version, is read once."""

    def __init__(self, access: Access, cache: Cache) -> None:
        self.access, self.cache = access, cache
        self.here = cache.newest(time.time())

    def outdated(self, manifest: Manifest) -> bool:
        """Return whether the origin has abandoned the manifest's publication, as far as this client knows."""
        stated = self.access.newest or Newest.of(manifest)
        believed = latest(stated, Newest.of(self.here) if self.here else None, time.time())
        return believed is not None and believed.outdates(manifest)

    def newest(self, offers: Sequence[Offer]) -> Offer | None:
        """Return the newest of the offers and the cached version, so that a lagging server cannot cause a downgrade."""
        current = [offer for offer in offers if not self.outdated(offer[1])]
        best = max(current, key=lambda o: (o[1].version, o[1].created_s), default=None)
        here = self.here
        if here is None or self.outdated(here):
            return best
        behind = best is None or (best[1].version < here.version and best[1].created_s <= here.created_s)
        return self.cache.offer(here.version) if behind else best


OFFERS_TRIED = 5  # how many versions of one relay to try, newest first, until one has a valid manifest

Step = tuple[Offer, Part]


async def plan(cache: Cache, sources: Sources, offer: Offer) -> tuple[int | None, list[Step]]:
    """Return the cached version to start from, or None, and the streams to fetch. Raise NoRouteError."""
    routes: list[tuple[int, int | None, list[Step]]] = []
    deltas: list[Step] = []  # from the version under consideration to the target
    reasons: dict[str, str] = {}  # why each URL did not offer the last requested parent
    while True:
        manifest = offer[1]
        cost_bytes = sum(o[1].streams[part].size_bytes for o, part in deltas)
        if deltas and cache.manifest(manifest.version, manifest.digest):
            routes.append((cost_bytes, manifest.version, deltas))
            break  # earlier versions cost more
        if manifest.anchor:
            routes.append((cost_bytes + manifest.size_bytes, None, [(offer, "full"), *deltas]))
            if not cache.versions():
                break
        if manifest.delta is None or cost_bytes > min((route[0] for route in routes), default=cost_bytes):
            break
        deltas = [(offer, "delta"), *deltas]
        parent, digest = manifest.delta.parent, manifest.delta.parent_digest
        parent_offer = cache.offer(parent) if cache.manifest(parent, digest) else None
        if parent_offer is None:
            try:
                answers, reasons = await sources.ask(bind(offered, version=parent, digest=digest))
            except RefusedVersionError:
                if not routes:
                    raise
                break
            parent_offer = next((answer for answer in answers.values() if answer), None)
        if parent_offer is None:
            break
        offer = parent_offer
    if not routes:
        child = deltas[0][0][1]
        why = "; ".join(f"{url}: {reason}" for url, reason in reasons.items())
        raise NoRouteError(
            f"no relay holds version {child.delta and child.delta.parent}, the parent of version {child.version} "
            f"({why}); add a relay that has it, or try again later"
        )
    _, start, steps = min(routes, key=lambda route: route[0])
    return start, steps


async def offered(
    source: Source,
    *,
    version: int | None,
    digest: str | None,
    outdated: Callable[[Manifest], bool] = lambda manifest: False,
) -> Offer | None:
    """Return the manifest of `version`, or of the newest version for which the server has a valid one; None if the
    server lists no version. Raise SourceError. The first bad manifest ends the search."""
    versions = [version] if version is not None else (await source.listing()).versions[:OFFERS_TRIED]
    refused: SourceError | None = None
    for candidate in versions:
        try:
            offer = await source.manifest(candidate)
        except NotHeld as error:
            refused = error
            continue
        if digest not in (None, offer[1].digest):
            refused = NotHeld(source.url, f"version {candidate} has digest {offer[1].digest}, expected {digest}")
        elif not outdated(offer[1]):
            return offer
        elif version is not None:
            refused = NotHeld(source.url, f"offers a version {candidate} from before the origin started over")
    if refused is not None:
        raise refused
    return None


def fetch_published(
    client: Client, version: int, *, digest: str | None = None, wait_s: float = 120
) -> tuple[Path, Manifest]:
    """Fetch a version that is published but may not have reached a relay yet. Raise FetchError after `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            return client.fetch(version, digest=digest)
        except FetchError as error:
            if time.monotonic() > deadline_s or isinstance(error, RefusedVersionError):
                raise
            time.sleep(POLL_S)


class Follower:
    """Fetch in the background: whenever `wanted()` names a newer version, fetch it with a new `client()`."""

    def __init__(self, wanted: Callable[[], int | None], client: Callable[[], Client]) -> None:
        self.wanted = wanted
        self.client = client
        self.last_error = ""  # why the newest version could not be fetched
        self._held: tuple[Path, Manifest] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="follower")

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()

    def newest(self) -> tuple[Path, Manifest] | None:
        """Return the newest complete and verified version on this machine."""
        return self._held

    def _follow(self) -> None:
        while not self._stop.wait(POLL_S):
            wanted = self.wanted()
            if wanted is None or (self._held and self._held[1].version >= wanted):
                continue
            try:
                self._held = self.client().fetch(wanted)
                self.last_error = ""
            except (FetchError, OSError) as error:  # the next round tries again
                if str(error) != self.last_error:
                    log.warning("cannot fetch version %d yet: %s", wanted, error)
                self.last_error = str(error)  # shown by the caller
