"""Which version to fetch, and by which streams.

The newest: of the versions that servers offer, and of those that are here; `manifest.latest` says how publications compare.
The route with the fewest bytes:

    from an empty cache      the content of the version or of an earlier anchor, then the deltas after that
    from a cached version    the deltas since then, if they are smaller

Invariant: a client never goes back: not to a publication that its origin left, nor to an older version than it holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial as bind

from shoal.shardcast.fetch import FetchError, NoRouteError, NotHeld, SourceError
from shoal.shardcast.fetch.cache import Cache
from shoal.shardcast.fetch.source import Access, Offer, Source
from shoal.shardcast.fetch.sources import Sources
from shoal.shardcast.manifest import Manifest, Newest, Part, latest


class Freshness:
    """For one question: `here` is read once."""

    def __init__(self, access: Access, cache: Cache, max_age_s: float | None) -> None:
        self.access, self.cache, self.max_age_s = access, cache, max_age_s
        self.here = cache.newest(time.time())

    def outdated(self, manifest: Manifest) -> bool:
        """Whether the origin has left the manifest's publication, as far as this client knows."""
        stated = self.access.newest or Newest.of(manifest)
        believed = latest(stated, Newest.of(self.here) if self.here else None, time.time())
        return believed is not None and believed.outdates(manifest)

    def newest(self, offers: Sequence[Offer]) -> Offer | None:
        """The newest of these and of what is here: a server that is behind cannot take a client back."""
        current = [offer for offer in offers if not self.outdated(offer[1])]
        best = max(current, key=lambda o: (o[1].version, o[1].created_s, len(o[1].content.shards)), default=None)
        here = self.here
        if here is None or self.outdated(here):
            return best
        behind = best is None or (best[1].version < here.version and best[1].created_s <= here.created_s)
        return self.cache.offer(here.version) if behind else best

    def too_old(self, offer: Offer | None) -> bool:
        """Whether the limit on age demands a newer version than this one."""
        stated = self.access.newest
        if self.max_age_s is None or stated is None:
            return False
        return offer is None or stated.outdates(offer[1]) or offer[1].version < stated.version

    def check_age(self, urls: Sequence[str]) -> None:
        """Raises FetchError unless the origin's latest statement is recent enough, by this machine's clock."""
        stated, limit_s = self.access.newest, self.max_age_s
        age_s = time.time() - stated.as_of_s if stated else math.inf
        if limit_s is None or abs(age_s) <= limit_s:
            return
        age = f"is {abs(age_s):.0f} s {'old' if age_s > 0 else 'ahead of this clock'}" if stated else "is missing"
        raise FetchError(
            f"the origin's statement of its newest version {age}, --max-age allows {limit_s:.0f} s; "
            f"{', '.join(urls)} may be cut off from the origin, or it stopped, or a clock is wrong: ask others"
        )

    def withheld(self, offer: Offer | None, urls: Sequence[str]) -> FetchError:
        """Why `too_old` is an error."""
        stated, best = self.access.newest, f"version {offer[1].version}" if offer else "none of it"
        assert stated is not None
        return FetchError(
            f"the origin's newest version is {stated.version}, and {', '.join(urls)} offer {best}; "
            "with --max-age nothing older is taken: wait, or ask others"
        )


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
