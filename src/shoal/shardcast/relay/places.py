"""How sibling relays divide the shards among them, and each relay chooses a parent, without communication.

Invariant: every relay computes the same owners of a shard, in any order it learned of its siblings.
Called by the relay.
Left out: the real uplink of a server; its measured speed is used instead.
Source: rendezvous hashing with weights (Thaler and Ravishankar 1998; Schindelhauer and Schomaker 2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from blake3 import blake3

from shoal.shardcast.fetch.source import Source
from shoal.shardcast.format.manifest import ShardEntry


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
