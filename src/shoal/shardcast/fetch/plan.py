"""How to get to a version from what is here: the fewest bytes.

    from nothing    its content, where it is an anchor; else an anchor's, and the deltas after it
    from a version  the deltas since then, where they are fewer bytes

Called by the client.
"""

from __future__ import annotations

from functools import partial as bind

from shoal.shardcast.fetch.cache import Cache
from shoal.shardcast.fetch.source import BadData, NotHeld, Offer, Source, SourceError
from shoal.shardcast.fetch.sources import FetchError, Sources
from shoal.shardcast.format.manifest import Part

OFFERS_TRIED = 5  # of one relay's newest versions, until a manifest verifies

Step = tuple[Offer, Part]


class NoWayError(FetchError):
    """Nobody offers a version that the one wanted is a delta of; it may be on its way to them."""


async def plan(cache: Cache, sources: Sources, offer: Offer) -> tuple[int | None, list[Step]]:
    """The cheapest way to a version: the one in the cache to start from, or None, and the streams from there on.
    Raises NoWayError."""
    ways: list[tuple[int, int | None, list[Step]]] = []
    behind: list[Step] = []  # deltas from the version looked at to the one wanted
    reasons: dict[str, str] = {}  # by URL, for want of the version last asked for
    while True:
        manifest = offer[1]
        cost_bytes = sum(o[1].streams[part].size_bytes for o, part in behind)
        if behind and cache.held(manifest.version, manifest.digest):
            ways.append((cost_bytes, manifest.version, behind))
            break  # what is further back costs more
        if manifest.anchor:
            ways.append((cost_bytes + manifest.size_bytes, None, [(offer, "full"), *behind]))
            if not cache.versions():
                break
        if manifest.delta is None or cost_bytes > min((way[0] for way in ways), default=cost_bytes):
            break
        behind = [(offer, "delta"), *behind]
        parent, digest = manifest.delta.parent, manifest.delta.parent_digest
        found = cache.offer(parent) if cache.held(parent, digest) else None
        if found is None:
            answers, reasons = await sources.ask(bind(offered, version=parent, digest=digest), grace_s=0.5)
            found = next((answer for answer in answers.values() if answer), None)
        if found is None:
            break
        offer = found
    if not ways:
        child = behind[0][0][1]
        why = "; ".join(f"{url}: {reason}" for url, reason in reasons.items())
        raise NoWayError(
            f"no relay holds version {child.delta and child.delta.parent}, which version {child.version} is a delta of "
            f"({why}); add a relay that has it, or try again later"
        )
    _, start, steps = min(ways, key=lambda way: way[0])
    return start, steps


async def offered(source: Source, *, version: int | None, digest: str | None) -> Offer | None:
    """What one relay can prove; None if it says that nothing is published. Raises SourceError."""
    versions = [version] if version is not None else (await source.listing()).versions[:OFFERS_TRIED]
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
