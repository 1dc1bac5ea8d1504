"""Where a relay stands among the servers it knows, and how siblings divide the shards among them without communication.

Invariant: every relay computes the same owners of a shard, in any order it learned of its siblings.
Called by the relay.
Left out: the real uplink of a server; its measured speed is used instead.
Source: rendezvous hashing with weights (Thaler and Ravishankar 1998; Schindelhauer and Schomaker 2005).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log

from blake3 import blake3

from shoal.shardcast.fetch.source import Source
from shoal.shardcast.fetch.sources import Sources
from shoal.shardcast.format.manifest import ShardEntry
from shoal.shardcast.format.names import MAX_HOPS, Listing

SLOW = 0.25  # siblings below this share of the best one's speed are skipped


class Place:
    def __init__(self, own: str) -> None:
        """`own`: the id of this relay's store."""
        self.own = own
        self.parents: list[Source] = []  # the first is preferred
        self.siblings: dict[str, Source] = {}  # by the id of their store
        self.behind: set[Source] = set()  # they fetch through this relay, or are this relay

    def find(self, listings: Mapping[Source, Listing]) -> tuple[str, ...]:
        """Finds parents and siblings from the paths in the listings. Returns the first parent's path; () without parents."""
        self.behind = {source for source, listing in listings.items() if self.own in listing.path}
        paths = {source: listing.path for source, listing in listings.items() if source not in self.behind}
        others = {source: path for source, path in paths.items() if 0 < len(path) < MAX_HOPS}
        if not others:
            return ()
        self.behind = {source for source in listings if source not in others}  # or may be, without a path
        shortest = min(map(len, others.values()))
        self.parents = by_choice(self.own, [source for source, path in others.items() if len(path) == shortest])
        self.siblings = {path[-1]: source for source, path in others.items() if len(path) == shortest + 1}
        return others[self.parents[0]]

    def order(self, sources: Sources, shard: ShardEntry, usable: Sequence[Source]) -> list[Source]:
        """The sources for a shard, best first: the first healthy owner (a parent, if this relay is the owner), then the
        parents in order of preference, then all others."""
        best_Bps = max((sibling.standing.speed_Bps() or 0.0 for sibling in self.siblings.values()), default=0.0)

        def healthy(source: Source) -> bool:
            speed_Bps = source.standing.speed_Bps() or best_Bps
            return source in usable and not sources.resting(source) and speed_Bps >= SLOW * best_Bps

        usable = [source for source in usable if source not in self.behind]
        owners = owners_of(shard, [self.own, *self.siblings])
        owner = next(id for id in owners if id == self.own or healthy(self.siblings[id]))
        first = self.siblings.get(owner)
        places = {parent: place for place, parent in enumerate(self.parents)}
        last = len(places)
        return sorted(usable, key=lambda s: (s is not first, s not in places, not healthy(s), places.get(s, last)))


def owners_of(shard: ShardEntry, ids: Sequence[str]) -> list[str]:
    """The siblings in the order in which they are responsible for fetching this shard from a parent. All siblings compute
    the same order, and each is first equally often."""
    ranked = sorted(ids)
    first = shard.index % len(ranked)
    return ranked[first:] + ranked[:first]


def by_choice(own: str, sources: Sequence[Source]) -> list[Source]:
    """The sources in the order in which the relay with this id prefers them. Each source is the first choice of a share of
    all relays in proportion to its expected throughput. The order changes only if that changes much."""
    best_Bps = (
        max((source.standing.speed_Bps() or 0.0 for source in sources), default=0.0) or 1.0
    )  # assumed if unmeasured

    def draw(source: Source) -> float:
        number = int(blake3(f"{own} {source.url}".encode()).hexdigest()[:13], 16)
        expected_Bps = source.standing.success() * (source.standing.speed_Bps() or best_Bps)
        return expected_Bps / -log((number + 1) / (16**13 + 1))

    return sorted(sources, key=draw, reverse=True)
