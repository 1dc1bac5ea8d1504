"""Plans the downloads that lead to a version with the fewest bytes.

    from an empty cache      the content of the version or of an earlier anchor, then the deltas after that
    from a cached version    the deltas since then, if they are smaller

Called by the client.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as bind

from shoal.shardcast.fetch.cache import Cache
from shoal.shardcast.fetch.errors import NoRouteError, NotHeld, SourceError
from shoal.shardcast.fetch.source import Offer, Source
from shoal.shardcast.fetch.sources import Sources
from shoal.shardcast.format.manifest import Manifest, Part

OFFERS_TRIED = 5  # newest versions of one relay, until a manifest is valid

Step = tuple[Offer, Part]


async def plan(cache: Cache, sources: Sources, offer: Offer) -> tuple[int | None, list[Step]]:
    """The cached version to start from, or None, and the streams to fetch from there. Raises NoRouteError."""
    routes: list[tuple[int, int | None, list[Step]]] = []
    deltas: list[Step] = []  # from the version considered now to the wanted one
    reasons: dict[str, str] = {}  # by URL, why it does not offer the last parent
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
        found = cache.offer(parent) if cache.manifest(parent, digest) else None
        if found is None:
            answers, reasons = await sources.ask(bind(offered, version=parent, digest=digest))
            found = next((answer for answer in answers.values() if answer), None)
        if found is None:
            break
        offer = found
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
    """The valid manifest that one server offers; None if it says that nothing is published. Raises SourceError: after one
    bad manifest the server is not asked for another."""
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
            refused = NotHeld(source.url, f"offers a version {candidate} of before the origin started over")
    if refused is not None:
        raise refused
    return None
