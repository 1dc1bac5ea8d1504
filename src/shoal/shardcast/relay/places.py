"""Who brings what from whom: the shares of siblings, and of relays among parents, without a word between them.

Invariant: each relay finds the same owners for a shard, whatever order it heard of its siblings in.
Called by the relay.
Left out: what a server's uplink is; what was measured of it stands for that.
Source: rendezvous hashing with weights (Thaler and Ravishankar 1998; Schindelhauer and Schomaker 2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from blake3 import blake3

from shoal.shardcast.fetch.source import Source
from shoal.shardcast.format.manifest import ShardEntry


def owners_of(shard: ShardEntry, ids: Sequence[str]) -> list[str]:
    """Siblings in the order in which they are to bring this shard from a parent: the same at each of them, each first as
    often as any other."""
    ranked = sorted(ids)
    first = shard.index % len(ranked)
    return ranked[first:] + ranked[:first]


def by_choice(own: str, sources: Sequence[Source]) -> list[Source]:
    """Sources in the order in which the relay with this id prefers them. Each of n is the first choice of its share of
    relays, in proportion to the throughput that is expected of it; the order changes only where that changes much."""
    hoped_Bps = max((source.standing.speed_Bps() or 0.0 for source in sources), default=0.0) or 1.0  # where unmeasured

    def draw(source: Source) -> float:
        number = int(blake3(f"{own} {source.url}".encode()).hexdigest()[:13], 16)
        expected_Bps = source.standing.success() * (source.standing.speed_Bps() or hoped_Bps)
        return expected_Bps / -log((number + 1) / (16**13 + 1))

    return sorted(sources, key=draw, reverse=True)
