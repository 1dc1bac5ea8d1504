"""Fetches one stream of a version, full or delta, which may still be growing at its origin.

Invariant: every shard is one that the version's signed manifest names, though the manifest may grow meanwhile. If the origin
replaces the version, the fetch ends with ReplacedError. If nothing comes for STALL_S, it ends with FetchError, whatever
servers send.
Called by the client.
"""

from __future__ import annotations

import asyncio
from functools import partial as bind

from shoal.shardcast.fetch.download import LEAST_BPS, Download, Movement
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
    download = Download(sources, offer[1].version, part, into.sink, parallel=parallel, deadline_s=deadline_s)
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(download.run())
            stream, movement = offer[1].streams[part], Movement(STALL_S)
            download.add(stream.entries(), last=stream.complete)
            while not running.done():
                await asyncio.wait([running], timeout=LOOK_AGAIN_S)
                if not stream.complete:
                    offer = await _grown(sources, offer)
                    stream = offer[1].streams[part]
                    download.add(stream.entries()[download.named :], last=stream.complete)
                if movement.stalled(download.named + download.done, download.moved_bytes):
                    raise FetchError(_stalled(sources, offer[1].version, download))
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return offer


def _stalled(sources: Sources, version: int, download: Download) -> str:
    if download.done == download.named:
        return f"version {version} is incomplete and has not grown for {STALL_S:.0f} s; check its origin"
    urls = ", ".join(source.url for source in [*sources.sources, *sources.fallback])
    return (
        f"version {version} made no progress for {STALL_S:.0f} s, with {download.named - download.done} of its shards "
        f"missing; {urls} send less than {LEAST_BPS} bytes a second: add a relay"
    )


async def _grown(sources: Sources, offer: Offer) -> Offer:
    answers, _ = await sources.ask(bind(offered, version=offer[1].version, digest=None))
    stated = sources.access.newest
    offers = [answer for answer in answers.values() if answer and not (stated and stated.outdates(answer[1]))]
    if any(answer[1].replaces(offer[1]) for answer in offers):
        raise ReplacedError(f"version {offer[1].version} was replaced while it was fetched; fetch again")
    offers = [answer for answer in offers if answer[1].extends(offer[1])]
    return max([offer, *offers], key=lambda o: len(o[1].content.shards))
