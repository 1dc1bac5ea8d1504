"""Which of the versions that servers offer, and of those that are here, is the newest, and whether that is recent enough.

Invariant: a client never goes back: not to a publication that its origin left, nor to an older version than it holds.
Called by the client. `format/newest` says how two publications compare.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from shoal.shardcast.fetch.access import Access
from shoal.shardcast.fetch.cache import Cache
from shoal.shardcast.fetch.errors import FetchError
from shoal.shardcast.fetch.source import Offer
from shoal.shardcast.format.manifest import Manifest
from shoal.shardcast.format.newest import Newest, latest


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
