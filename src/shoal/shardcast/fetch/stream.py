"""Fetches one stream of a version, full or delta, which may still be growing at its origin.

Invariant: every shard is one that the version's signed manifest names, though the manifest may grow meanwhile; if the origin
replaces or gives up the version, the fetch ends with ReplacedError and the caller plans anew.
Called by the client.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial as bind

from shoal.shardcast.fetch.download import Download
from shoal.shardcast.fetch.errors import FetchError, ReplacedError, first_error
from shoal.shardcast.fetch.partial import Partial
from shoal.shardcast.fetch.plan import offered
from shoal.shardcast.fetch.source import Offer
from shoal.shardcast.fetch.sources import Sources
from shoal.shardcast.format.manifest import Part

LOOK_AGAIN_S = 0.2
STALL_S = 60.0


async def fetch_stream(
    sources: Sources, offer: Offer, part: Part, into: Partial, *, parallel: int, deadline_s: float
) -> Offer:
    """Fetches the shards that `into` lacks. Returns the last manifest. Raises FetchError, ReplacedError, OSError."""
    version = offer[1].version
    download = Download(sources, version, part, into.sink, parallel=parallel, deadline_s=deadline_s)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(download.run())
            download.add(offer[1].streams[part].entries(), last=offer[1].streams[part].complete)
            grew_s = time.monotonic()
            while not offer[1].streams[part].complete:
                await asyncio.sleep(LOOK_AGAIN_S)
                newer = await _grown(sources, offer)
                new = newer[1].streams[part].entries()[len(offer[1].streams[part].shards) :]
                if new:
                    grew_s = time.monotonic()
                elif time.monotonic() - grew_s > STALL_S:
                    raise FetchError(
                        f"version {version} is incomplete and has not grown for {STALL_S:.0f} s; check its origin"
                    )
                offer = newer
                download.add(new, last=offer[1].streams[part].complete)
    except ExceptionGroup as errors:
        if not offer[1].streams[part].complete:
            await _check_offered(sources, offer)  # else its shards are others now
        raise first_error(errors) from errors
    return offer


async def _grown(sources: Sources, offer: Offer) -> Offer:
    answers, _ = await sources.ask(bind(offered, version=offer[1].version, digest=None))
    if any(answer and answer[1].replaces(offer[1]) for answer in answers.values()):
        raise ReplacedError(f"version {offer[1].version} was replaced while it was fetched; fetch again")
    offers = [answer for answer in answers.values() if answer and answer[1].extends(offer[1])]
    return max([offer, *offers], key=lambda o: len(o[1].content.shards))


async def _check_offered(sources: Sources, offer: Offer) -> None:
    """Raises ReplacedError if servers answer and none offers this version as it was begun."""
    answers, _ = await sources.ask(bind(offered, version=offer[1].version, digest=None))
    if answers and not any(answer and answer[1].extends(offer[1]) for answer in answers.values()):
        raise ReplacedError(f"version {offer[1].version} was given up while it was fetched; fetch again")
