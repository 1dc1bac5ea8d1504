"""The HTTP face of a store, the same for origin and relay: plain files, byte ranges, nothing else.

Invariant: only versions.json and files named exactly like a version's manifest or shard can be asked for. A
shard that the version's manifest names but that has not arrived yet is waited for, at most `wait_s`, then 503
with Retry-After; so a client can follow a relay that is still mirroring. Reads the store afresh each time:
the writer may be another process.
Called by the origin and relay processes; nginx over the same folder does as well (without the waiting).
Left out: TLS, rate limits, authentication (weights are public; what is secret is the signing key).
Paper: INTELLECT-2, SHARDCAST: relays are plain HTTP servers.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from .manifest import Manifest, ManifestError
from .store import SHARD_PATTERN, VERSION_PATTERN, Store, parse_version

LOOK_AGAIN_S = 0.02


class Traffic:
    """What this server sent, counted when a body has gone out whole."""

    served_bytes = 0


STORE = web.AppKey("store", Store)
WAIT_S = web.AppKey("wait_s", float)
TRAFFIC = web.AppKey("traffic", Traffic)


def app(store: Path, *, wait_s: float = 10.0) -> web.Application:
    """`wait_s` must stay below the idle timeout of clients (30 s by default)."""
    application = web.Application()
    application[STORE], application[WAIT_S], application[TRAFFIC] = Store(store), wait_s, Traffic()
    application.add_routes(
        [
            web.get("/healthz", _health),
            web.get("/versions.json", _versions),
            web.get(f"/{{version:{VERSION_PATTERN}}}/manifest.json", _manifest),
            web.get(f"/{{version:{VERSION_PATTERN}}}/{{shard:{SHARD_PATTERN}}}", _shard),
        ]
    )
    return application


async def serve(application: web.Application, host: str = "127.0.0.1", port: int = 0) -> tuple[web.AppRunner, int]:
    """Starts serving; returns the runner (to `cleanup()`) and the port, which is a free one for port 0."""
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError:
        await runner.cleanup()
        raise
    return runner, int(runner.addresses[0][1])


class _CountedFile(web.FileResponse):
    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        writer = await super().prepare(request)  # sends the file
        if request.method == "GET" and self.status in (200, 206) and isinstance(request, web.Request):
            request.app[TRAFFIC].served_bytes += self.content_length or 0
        return writer


async def _health(request: web.Request) -> web.Response:
    traffic = request.app[TRAFFIC]
    return web.json_response(
        {"versions": request.app[STORE].versions(), "served_bytes": traffic.served_bytes}, headers=_FRESH
    )


async def _versions(request: web.Request) -> web.StreamResponse:
    return _CountedFile(request.app[STORE].path / "versions.json", headers=_FRESH)


async def _manifest(request: web.Request) -> web.StreamResponse:
    return _CountedFile(request.app[STORE].manifest_path(_version(request)))


async def _shard(request: web.Request) -> web.StreamResponse:
    store, version = request.app[STORE], _version(request)
    index = int(request.match_info["shard"].removesuffix(".shard"))
    path = store.shard_path(version, index)
    deadline_s = time.monotonic() + request.app[WAIT_S]
    promised = False
    while not path.is_file():
        promised = promised or _names(store, version, index)
        if not promised or not store.manifest_path(version).is_file():
            raise web.HTTPNotFound
        if time.monotonic() >= deadline_s:
            raise web.HTTPServiceUnavailable(
                headers={"Retry-After": "1", "Cache-Control": "no-store"},
                text="this shard has not arrived yet\n",
            )
        await asyncio.sleep(LOOK_AGAIN_S)
    return _CountedFile(path)


def _version(request: web.Request) -> int:
    version = parse_version(request.match_info["version"])
    if version is None:
        raise web.HTTPNotFound
    return version


def _names(store: Store, version: int, index: int) -> bool:
    """Does the manifest in the store name this shard? The store's writer has checked its signature."""
    try:
        signed = store.signed(version)
        return signed is not None and index < len(Manifest.model_validate_json(signed.manifest).shards)
    except ManifestError:
        return False


_FRESH = {"Cache-Control": "no-cache"}
