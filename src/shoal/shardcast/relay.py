"""The relay: mirror the newest upstream versions into a store, and serve shards while they arrive.

`upstream` may list origins and relays in any order. Each server publishes its path from the origin in versions.json. The
servers nearest to the origin are this relay's parents. Servers as far from the origin as this relay are its siblings.
Servers downstream of this relay are never used, so there are no loops. Siblings share the parents' uplink: rendezvous
hashing chooses one relay among them as each shard's owner. The owner fetches the shard from a parent. The others fetch
it from the owner while it is still arriving. So each byte leaves the origin about once, however many relays there are.
With several parents, relays spread over them (`by_preference`). If the preferred parent fails, a relay uses another.

    origin ──shard 1──▶ relay A ──shard 1──▶ relay B         owner of shard 1: A
           ──shard 2──▶ relay B ──shard 2──▶ relay A         owner of shard 2: B

If an owner is down or slow, the next relay in hash order takes its place. If all relays before this one fail, this
relay fetches the shard from a parent.
Invariant: a version is listed only after its manifest was verified with the learner's key. A shard gets its final name
only after its hash matched. So every listed version and every finished shard is the learner's, whatever upstream sends.
`server.app` serves the relay's store.
Paper: INTELLECT-2 (arXiv 2505.07291), SHARDCAST: relays mirror the origin and serve shards before the version is whole.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from blake3 import blake3

from shoal.shardcast.fetch import BadData, FetchError, NotHeld
from shoal.shardcast.fetch.download import Sources, StreamDownload
from shoal.shardcast.fetch.reach import proxy_for
from shoal.shardcast.fetch.source import Access, Arrival, Offer, Source
from shoal.shardcast.manifest import (
    MAX_HOPS,
    Listing,
    Manifest,
    ManifestError,
    Newest,
    Part,
    ShardEntry,
    SignedNewest,
    latest,
)
from shoal.shardcast.store import ShardStore

SLOW = 0.25  # siblings below this fraction of the best sibling's speed are skipped


class Place:
    """The place of a relay in the network: its parents and siblings."""

    def __init__(self, own: str) -> None:
        """`own` is the id of this relay's store."""
        self.own = own
        self.parents: list[Source] = []  # the first is preferred
        self.siblings: dict[str, Source] = {}  # by the id of their store
        self.behind: set[Source] = set()  # this relay itself, and servers that are or may be downstream of it

    def find(self, listings: Mapping[Source, Listing]) -> tuple[str, ...]:
        """Set parents and siblings from the paths in the listings. Return the first parent's path; () without parents."""
        self.behind = {source for source, listing in listings.items() if self.own in listing.path}
        paths = {source: listing.path for source, listing in listings.items() if source not in self.behind}
        others = {source: path for source, path in paths.items() if 0 < len(path) < MAX_HOPS}
        if not others:
            return ()
        # A server that states no path may be downstream of this relay.
        self.behind = {source for source in listings if source not in others}
        shortest = min(map(len, others.values()))
        self.parents = by_preference(self.own, [source for source, path in others.items() if len(path) == shortest])
        self.siblings = {path[-1]: source for source, path in others.items() if len(path) == shortest + 1}
        return others[self.parents[0]]

    def order(self, shard: ShardEntry, usable: Sequence[Source]) -> list[Source]:
        """Rank the sources for a shard. First comes the owner: the first healthy one in hash order. Then come the
        parents in order of preference, then all others. If this relay is the owner, the parents come first."""
        best_Bps = max((sibling.standing.speed_Bps() or 0.0 for sibling in self.siblings.values()), default=0.0)

        def healthy(source: Source) -> bool:
            speed_Bps = source.standing.speed_Bps() or best_Bps
            return source in usable and source.standing.healthy() and speed_Bps >= SLOW * best_Bps

        usable = [source for source in usable if source not in self.behind]
        owners = owners_of(shard, [self.own, *self.siblings])
        owner = next(id for id in owners if id == self.own or healthy(self.siblings[id]))
        first = self.siblings.get(owner)
        ranks = {parent: rank for rank, parent in enumerate(self.parents)}
        last = len(ranks)
        return sorted(usable, key=lambda s: (s is not first, s not in ranks, not healthy(s), ranks.get(s, last)))


def owners_of(shard: ShardEntry, ids: Sequence[str]) -> list[str]:
    """Return the ids, ordered by rendezvous hashing. The first one that is available owns this shard: it fetches the
    shard from a parent. Any two ids have the same order on every relay, so siblings never wait for each other in a
    circle, even if some do not know all the others."""
    return sorted(ids, key=lambda id: blake3(f"{shard.hash} {id}".encode()).digest())


def by_preference(own: str, sources: Sequence[Source]) -> list[Source]:
    """Return the sources in this relay's order of preference. The share of all relays that prefer a source is
    proportional to its expected throughput. The order changes only if throughputs change much."""
    # If no speed is known, the best speed is taken to be 1.0.
    best_Bps = max((source.standing.speed_Bps() or 0.0 for source in sources), default=0.0) or 1.0

    def draw(source: Source) -> float:
        number = int(blake3(f"{own} {source.url}".encode()).hexdigest()[:13], 16)
        expected_Bps = source.standing.success() * (source.standing.speed_Bps() or best_Bps)
        return expected_Bps / -math.log((number + 1) / (16**13 + 1))

    return sorted(sources, key=draw, reverse=True)


class ShardFile:
    """Store one shard. Readers may read it while it arrives."""

    def __init__(self, store: ShardStore, version: int, part: Part, shard: ShardEntry) -> None:
        self.file = store.new_shard(version, part, shard.index)
        self.write, self.restart = self.file.write, self.file.truncate

    def done(self) -> None:
        self.file.commit(durable=False)

    def close(self) -> None:
        with suppress(FileNotFoundError):
            self.file.close()


PARTS: tuple[Part, ...] = ("delta", "full")
PARALLEL = 2  # shards fetched at a time from each owner
MAX_QUERIED = 8  # servers that a relay queries in each round of `mirror`
VERSION_TIMEOUT_S = 3600.0  # for one part of a version
FORGET_SILENT_S = 10.0  # this long after its last answer, the listing of a silent server is forgotten


@dataclass
class RelayStatus:
    versions: list[int] = field(default_factory=list)  # complete and verified by this process, newest first
    mirroring: int | None = None
    bytes_in: int = 0
    arrival: Arrival | None = None  # the last mirrored version
    last_error: str | None = None


class Relay:
    """The only writer of its store. Upstream servers are origins or relays; none is trusted."""

    def __init__(
        self,
        upstream: Sequence[str] | Callable[[], Sequence[str]],
        store: ShardStore,
        access: Access,
        *,
        poll_s: float = 0.2,
        longest_pause_s: float = 5.0,
        stall_s: float = 15.0,
    ) -> None:
        """`upstream` may be a function, called in each round of `mirror`. A version without progress for `stall_s` is
        retried in the next round, unless there is a newer version. Raise FetchError for a bad URL in a list."""
        for url in () if callable(upstream) else upstream:
            proxy_for(url)
        self.upstream: Callable[[], Sequence[str]] = upstream if callable(upstream) else lambda: upstream
        self.store, self.access = store, access
        self.poll_s, self.longest_pause_s, self.stall_s = poll_s, longest_pause_s, stall_s
        self.status = RelayStatus()
        self.store.lock()
        self.store.recover()
        self._held: dict[int, Manifest] = {}  # stored manifests, complete or not
        # The missing shards of each version. They are kept, so that files are hashed once even if every round fails.
        self._missing: dict[int, set[tuple[Part, ShardEntry]]] = {}
        self._queried: list[Source] = []  # servers queried in this round
        self._known: dict[Source, Listing] = {}  # last listing of each server, forgotten after a long silence
        self._heard_s: dict[Source, float] = {}  # when the last listing arrived
        self.place = Place(store.id)
        self._statements: dict[SignedNewest, Newest | None] = {}  # a cache of the last opened statement
        self._stated: Newest | None = None  # the latest of the origin's statements
        self._open_held()

    async def mirror(self) -> None:
        """Mirror until cancelled. Failures do not stop it; the last one is in `status`."""
        async with Sources.open(self.access, self.upstream(), on_failure=self._note) as sources:
            pause_s = self.poll_s
            while True:
                try:
                    sources.use(self.upstream())
                    reached = await self._round(sources)
                except OSError as error:  # the disk is full or broken
                    reached = False
                    self._note(error)
                pause_s = self.poll_s if reached else min(pause_s * 2, self.longest_pause_s)
                await asyncio.sleep(pause_s)

    async def _round(self, sources: Sources) -> bool:
        """Complete the newest incomplete version, if any. Return False if no upstream answered."""
        listings = await self._listings(sources)
        known = {source: listing for source, listing in self._known.items() if source in sources.sources}
        if path := self.place.find(known | listings):
            self.store.reached_via(path)
        self._pass_on(listings.values())
        self._leave_outdated()
        listed = {version for listing in listings.values() for version in listing.versions}
        # Take only the newest versions of each source, so that a bogus list cannot displace the others.
        newest = {version for listing in listings.values() for version in listing.versions[: self.store.keep]}
        needed: set[int] = set()  # parents of the versions considered so far
        adopted = 0  # how many of the versions considered so far have a manifest
        for version in sorted({*listed, *self._held}, reverse=True):
            if version not in needed and (adopted >= self.store.keep or version not in newest | self._held.keys()):
                continue
            try:
                manifest = await self._adopted(sources, version)
                if manifest is None:
                    continue
                adopted += 1
                if manifest.delta and not manifest.anchor:
                    needed.add(manifest.delta.parent)
                if version in self.status.versions or (await self._is_incomplete(manifest) and not listings):
                    continue
                await self._complete(sources, version)
                return True
            except (FetchError, OSError) as error:
                self._note(error)  # then try an older version
                if listings and version not in listed:
                    self._drop(version)  # it is incomplete and no longer listed upstream
        return bool(listings)

    async def _listings(self, sources: Sources) -> dict[Source, Listing]:
        """Query all servers if they are few; otherwise the first parents and a random sample of the others."""
        self._queried = list(sources.sources)
        if len(self._queried) > MAX_QUERIED:
            parents = [source for source in self.place.parents if source in self._queried][: MAX_QUERIED // 2]
            others = [source for source in self._queried if source not in parents]
            self._queried = parents + random.sample(others, MAX_QUERIED - len(parents))
        listings, _ = await sources.ask_all(lambda source: source.listing(), among=self._queried)
        now_s = time.monotonic()
        for source in self._queried:  # keep the listing of a server that one lost packet makes silent
            late = source.standing.silent() and now_s - self._heard_s.get(source, -math.inf) < FORGET_SILENT_S
            if source not in listings and not late:
                self._known.pop(source, None)
        self._known |= listings
        self._heard_s |= dict.fromkeys(listings, now_s)
        return listings

    def _pass_on(self, listings: Iterable[Listing]) -> None:
        """Store the origin's latest statement that any server has."""
        best: SignedNewest | None = None
        self._stated = None
        for signed in (self.store.newest, *(listing.newest for listing in listings)):
            newest = signed and self._opened(signed)
            if newest and latest(self._stated, newest, time.time()) is newest:
                best, self._stated = signed, newest
        self.store.state(best)

    def _leave_outdated(self) -> None:
        """Drop all versions of an abandoned publication, because the origin may reuse their numbers."""
        stated = self._stated
        outdated = [version for version, manifest in self._held.items() if stated and stated.outdates(manifest)]
        for version in outdated:
            self._drop(version)

    def _opened(self, signed: SignedNewest) -> Newest | None:
        if signed not in self._statements:
            self._statements = {signed: signed.open(self.access.public_key, run=self.access.run)}
        return self._statements[signed]

    async def _adopted(self, sources: Sources, version: int) -> Manifest | None:
        """Store and return the newest manifest of a version. Return None if there is none."""
        held = self._held.get(version)
        if held is not None and not self._missing.get(version):
            return held  # only an incomplete version is queried again, because the origin may have republished it

        async def offered(source: Source) -> Offer | None:
            try:
                offer = await source.manifest(version)
            except (BadData, NotHeld) as error:
                if isinstance(error, BadData):
                    self._note(error)
                return None
            return None if self._stated and self._stated.outdates(offer[1]) else offer

        answers, _ = await sources.ask_all(offered, among=self._queried)
        offers = [offer for offer in answers.values() if offer and not (held and held.supersedes(offer[1]))]
        nearest = [o for source, o in answers.items() if source in self.place.parents and o in offers]
        best = max([*nearest, *offers], key=lambda offer: offer[1].created_s, default=None)
        if best is not None and best[1] != held:
            signed, manifest = best
            if version not in self.store.wanted({**self._held, version: manifest}):
                return None
            self.store.add_manifest(version, signed)
            self._held[version] = manifest
            self._missing.pop(version, None)  # the shards on disk may belong to the previous manifest
        return self._held.get(version)

    async def _is_incomplete(self, manifest: Manifest) -> bool:
        """Return whether a shard of this version is missing."""
        if manifest.version not in self._missing:
            self._missing[manifest.version] = set(await asyncio.to_thread(self.store.missing, manifest))
        return bool(self._missing[manifest.version])

    async def _complete(self, sources: Sources, version: int) -> None:
        """Fetch the missing shards. Raise FetchError, OSError."""
        await self._is_incomplete(self._held[version])
        self.status.mirroring = version
        started_s, had_bytes = time.monotonic(), sources.by_source()
        try:
            for part in PARTS:
                await self._fetch(sources, version, part)
        finally:
            self.status.mirroring = None
            self.status.bytes_in = sources.received_bytes
        took_s = time.monotonic() - started_s
        new_bytes = {url: size_bytes - had_bytes.get(url, 0) for url, size_bytes in sources.by_source().items()}
        self.status.arrival = Arrival(
            version=version,
            size_bytes=sum(new_bytes.values()),
            took_s=took_s,
            at_s=started_s + took_s,
            rates_Bps={url: size_bytes / took_s for url, size_bytes in new_bytes.items() if size_bytes},
            behind_s=max(time.time() - self._held[version].created_s, 0.0),
        )
        self.store.retain(self._held)
        self.status.versions = sorted({*self.status.versions, version}, reverse=True)
        self._forget_dropped()

    async def _fetch(self, sources: Sources, version: int, part: Part) -> None:
        """Fetch one part of a version, from all owners at the same time."""
        if part not in self._held[version].streams:
            return
        missing = self._missing[version]
        ids = [self.store.id, *self.place.siblings]
        entries = [entry for entry in self._held[version].streams[part].entries() if (part, entry) in missing]
        await StreamDownload(
            sources,
            version,
            part,
            [[entry for entry in entries if owners_of(entry, ids)[0] == owner] for owner in ids],
            lambda shard: ShardFile(self.store, version, part, shard),
            parallel=PARALLEL,
            deadline_s=time.monotonic() + VERSION_TIMEOUT_S,
            stall_s=self.stall_s,
            order=self.place.order,
            on_shard=lambda shard: missing.discard((part, shard)),
        ).run()

    def _open_held(self) -> None:
        for version in self.store.versions():
            try:
                signed = self.store.signed(version)
                if signed is not None:
                    self._held[version] = signed.open(self.access.public_key, run=self.access.run, version=version)
            except ManifestError as error:  # it belongs to another run or key, or it is damaged
                self._note(error)
                self.store.discard(version)

    def _drop(self, version: int) -> None:
        self.store.discard(version)
        self._forget_dropped()

    def _forget_dropped(self) -> None:
        """Forget the versions that the store has dropped."""
        kept = set(self.store.versions())
        self._held = {held: manifest for held, manifest in self._held.items() if held in kept}
        self._missing = {held: missing for held, missing in self._missing.items() if held in kept}
        self.status.versions = [version for version in self.status.versions if version in kept]

    def _note(self, error: Exception) -> None:
        self.status.last_error = str(error)
