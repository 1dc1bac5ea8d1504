"""Serve a store over HTTP, for origins and relays alike: plain files with byte ranges.

    /healthz  /versions.json  /v000007/manifest.json  /v000007/full/00000.shard  /v000007/delta/00000.shard

Invariant: only versions.json and the manifest and shards of stored versions can be requested.
A client can read from a relay that is still mirroring. A shard that is still arriving is sent as it grows. If it stops
arriving, the connection is closed, so the reader sees a truncated body. A request for a shard that has not started to
arrive waits up to `wait_s` and then gets 503 with Retry-After.
nginx can serve the same folder, except shards that are still arriving.
Left out: HTTP/2; compression, because weights do not compress; access control, which is in guard.py; and connection
limits, which are in connections.py.
Paper: INTELLECT-2, SHARDCAST: relays are plain HTTP servers, and serve shards before the version is whole.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from shoal.files import temporary
from shoal.shardcast.connections import LISTENER, LOG, PATIENCE, Listener, Patience, keep_all_open, started
from shoal.shardcast.guard import Guard
from shoal.shardcast.manifest import VERSION_PATTERN, ManifestError, Part, Stream, parse_version
from shoal.shardcast.store import ShardStore

MAX_PARSED = 64
MAX_PATHS = 4096
HASH_BYTES = 32
PER_ADDRESS, CONNECTIONS = 64, 4096  # open connections of one address and in all, for a server with a guard


@dataclass(frozen=True)
class ServedVersion:
    """The streams of a manifest, with their hashes as bytes."""

    streams: dict[Part, Stream]
    hashes: dict[Part, bytes]

    def shard_bytes(self, part: Part, index: int) -> int:
        """Return the size of a shard, 0 if there is no such shard."""
        stream = self.streams.get(part)
        if stream is None:
            return 0
        return max(0, min(stream.shard_size_bytes, stream.size_bytes - index * stream.shard_size_bytes))

    def shard_hash(self, part: Part, index: int) -> str:
        """Return the hash of a shard in hex."""
        return self.hashes[part][index * HASH_BYTES : (index + 1) * HASH_BYTES].hex()


class Shelf:
    """A store with its parsed manifests and a count of sent bytes."""

    def __init__(self, store: ShardStore, wait_s: float) -> None:
        self.store, self.wait_s = store, wait_s
        # The paths are cached, because every request needs one.
        self.manifest_path = lru_cache(MAX_PARSED)(store.manifest_path)
        self.shard_path = lru_cache(MAX_PATHS)(store.shard_path)
        self.served_bytes = 0  # only bodies that were sent completely
        self._parsed: dict[int, tuple[tuple[int, ...], ServedVersion]] = {}

    def held(self, version: int) -> ServedVersion | None:
        """Return a version; None if it is not here, or its manifest is damaged."""
        path = self.manifest_path(version)
        try:
            stat = path.stat()
            seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if version not in self._parsed or self._parsed[version][0] != seen:
                self._parsed[version] = (seen, _parse(self.store, version))
                if len(self._parsed) > MAX_PARSED:
                    del self._parsed[next(iter(self._parsed))]
            return self._parsed[version][1]
        except (FileNotFoundError, ManifestError):
            self._parsed.pop(version, None)
            return None


def _parse(store: ShardStore, version: int) -> ServedVersion:
    """Parse a manifest whose signature the store's writer has verified. Raise FileNotFoundError, ManifestError."""
    signed = store.signed(version)
    if signed is None:
        raise FileNotFoundError
    manifest = signed.unchecked()
    streams = {part: stream.model_copy(update={"shards": ()}) for part, stream in manifest.streams.items()}
    hashes = {part: bytes.fromhex("".join(stream.shards)) for part, stream in manifest.streams.items()}
    return ServedVersion(streams, hashes)


POLL_S = 0.05
PIECE_BYTES = 8 << 20  # bytes sent between two renewals of the version's lease

BYTES = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
FRESH = {"Cache-Control": "no-cache"}
FOREVER = {"Cache-Control": "max-age=31536000, immutable"}
UNCHECKED = {"Cache-Control": "no-store"}  # the shard is not verified yet

RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})", re.ASCII | re.IGNORECASE)

ByteRange = tuple[int, int | None] | None  # first and last byte in a Range header, or None for the whole body

SHELF = web.AppKey("shelf", Shelf)
GUARD = web.AppKey("guard", Guard)


def app(store: ShardStore | Path, *, wait_s: float = 10.0, guard: Guard | None = None) -> web.Application:
    """Return the application that serves a store. `wait_s` must stay below the clients' idle timeout (30 s by default).
    Without a guard anyone may read."""
    application = web.Application(middlewares=[] if guard else [keep_all_open])
    application[SHELF] = Shelf(store if isinstance(store, ShardStore) else ShardStore(store), wait_s)
    version = f"/{{version:{VERSION_PATTERN}}}"
    application.add_routes(
        [
            # This route is first, because most requests are for shards.
            web.get(f"{version}/{{part:full|delta}}/{{index:[0-9]{{5}}}}.shard", _shard),
            web.get(f"{version}/manifest.json", _manifest),
            web.get("/versions.json", _versions),
            web.get("/healthz", _health),
        ]
    )
    if guard is not None:
        application[GUARD] = guard
        guard.attach(application)
    return application


async def serve(
    application: web.Application,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    patience: Patience = PATIENCE,
    shutdown_s: float = 1.0,
) -> tuple[web.AppRunner, int]:
    """Start serving. Return the runner and the port (port 0 picks a free one). The runner's `cleanup` stops serving; it
    gives running requests `shutdown_s` to finish."""
    per_address, total = (PER_ADDRESS, CONNECTIONS) if GUARD in application else (sys.maxsize, sys.maxsize)
    listener = Listener(host, port, patience, per_address=per_address, total=total)
    runner = await started(
        application,
        listener,
        shutdown_s=shutdown_s,
        logger=LOG,
        lingering_time=0,  # requests have no body
    )
    return runner, int(listener.getsockname()[1])


def url_of(host: str, port: int) -> str:
    """Return the URL of a server, with an IPv6 host in brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _File(web.FileResponse):
    """A list or a manifest. It is sent whole, even if the request has a Range header."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        request = request.clone(headers={name: text for name, text in request.headers.items() if name != "Range"})
        writer = await super().prepare(request)  # sends the file
        if request.method == "GET" and self.status == 200 and isinstance(request, web.Request):
            request.app[SHELF].served_bytes += self.content_length or 0
        return writer


async def _health(request: web.Request) -> web.Response:
    shelf, listener, guard = request.app[SHELF], request.app.get(LISTENER), request.app.get(GUARD)
    facts: dict[str, object] = {"versions": shelf.store.versions(), "served_bytes": shelf.served_bytes}
    if listener is not None:
        facts |= {"congestion": listener.congestion, "connections": len(listener.open)}
        facts |= {"connections_refused": listener.refused, "connections_cut": listener.cut}
    if guard is not None:
        facts |= {"requests_refused": guard.refused}
    return web.json_response(facts, headers=FRESH)


async def _versions(request: web.Request) -> web.StreamResponse:
    return _File(request.app[SHELF].store.path / "versions.json", headers=FRESH)


async def _manifest(request: web.Request) -> web.StreamResponse:
    version, _ = _version(request)
    # Caches must revalidate, because an origin that starts over publishes another manifest under the same name.
    return _File(request.app[SHELF].manifest_path(version), headers=FRESH)


async def _shard(request: web.Request) -> web.StreamResponse:
    shelf = request.app[SHELF]
    version, held = _version(request)
    part: Part = "full" if request.match_info["part"] == "full" else "delta"
    index = int(request.match_info["index"])
    size_bytes = held.shard_bytes(part, index)
    if not size_bytes:
        raise web.HTTPNotFound
    etag = held.shard_hash(part, index)
    byte_range = _parse_range(request)
    path = shelf.shard_path(version, part, index)
    deadline_s = time.monotonic() + shelf.wait_s
    while not (opened := _open(path, byte_range, size_bytes)):
        if shelf.held(version) is None:
            raise web.HTTPNotFound
        if time.monotonic() >= deadline_s:
            raise web.HTTPServiceUnavailable(
                headers={"Retry-After": "1", **UNCHECKED}, text="this shard has not arrived yet\n"
            )
        await asyncio.sleep(POLL_S)
        if _disconnected(request):
            return web.Response(status=503)
    file, size_bytes, caching = opened
    with file:
        start_bytes, end_bytes = _range(byte_range, size_bytes)
        response = web.StreamResponse(headers=BYTES | caching)
        response.etag = etag
        if byte_range:
            response.set_status(206)
            response.headers["Content-Range"] = f"bytes {start_bytes}-{end_bytes - 1}/{size_bytes}"
        response.content_length = end_bytes - start_bytes
        await response.prepare(request)
        if request.method == "GET" and await _send(request, file, version, start_bytes, end_bytes):
            await response.write_eof()
            shelf.served_bytes += end_bytes - start_bytes
        return response


async def _send(request: web.Request, file: BinaryIO, version: int, sent_bytes: int, end_bytes: int) -> bool:
    """Send a file that may still be growing, up to `end_bytes`. On failure close the connection and return False."""
    shelf, grew_s = request.app[SHELF], time.monotonic()
    while sent_bytes < end_bytes:
        transport = request.transport
        if transport is None or _disconnected(request):
            return False
        stat = os.fstat(file.fileno())
        arrived_bytes = min(stat.st_size, end_bytes)
        dropped = arrived_bytes < sent_bytes or (stat.st_nlink == 0 and arrived_bytes < end_bytes)
        if dropped or time.monotonic() - grew_s > shelf.wait_s:
            transport.abort()
            return False
        if arrived_bytes == sent_bytes:
            await asyncio.sleep(POLL_S)
            continue
        shelf.store.lease(version)
        try:
            piece_bytes = min(arrived_bytes - sent_bytes, PIECE_BYTES)
            sent_bytes += await asyncio.get_running_loop().sendfile(transport, file, sent_bytes, piece_bytes)
        except OSError:  # the reader left or the disk failed
            if request.transport is not None:  # the connection is still open
                transport.abort()
            return False
        grew_s = time.monotonic()
    return True


def _disconnected(request: web.Request) -> bool:
    """Return whether the reader has closed its connection."""
    return request.transport is None or request.transport.is_closing()


def _version(request: web.Request) -> tuple[int, ServedVersion]:
    """Return the requested version. A GET renews its lease; a HEAD does not. Raise HTTPNotFound."""
    shelf, version = request.app[SHELF], parse_version(request.match_info["version"])
    held = None if version is None else shelf.held(version)
    if version is None or held is None:
        raise web.HTTPNotFound
    if request.method == "GET":
        shelf.store.lease(version)
    return version, held


def _range(byte_range: ByteRange, size_bytes: int) -> tuple[int, int]:
    """Return the first requested byte and the one after the last. Raise HTTPRequestRangeNotSatisfiable."""
    start, last = byte_range or (0, None)
    end = size_bytes if last is None else min(last + 1, size_bytes)
    if start >= end:
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{size_bytes}"})
    return start, end


def _parse_range(request: web.BaseRequest) -> ByteRange:
    """Parse the Range header. Return None (the whole body) unless this is a GET request with a single valid range.
    RFC 9110 (14.2): a server must ignore malformed ranges and ranges in other methods. It may ignore all ranges."""
    match = RANGE.fullmatch(request.headers.get("Range", "").strip())
    if request.method != "GET" or "If-Range" in request.headers or match is None:
        return None
    first, last = int(match[1]), int(match[2]) if match[2] else None
    return None if last is not None and last < first else (first, last)


def _open(path: Path, byte_range: ByteRange, size_bytes: int) -> tuple[BinaryIO, int, dict[str, str]] | None:
    """Open a shard's complete file, or its growing file once that has the first requested byte. Return the file, its
    final size and its caching headers. Return None if there is nothing to send yet."""
    with suppress(FileNotFoundError):
        file = path.open("rb", buffering=0)
        return file, os.fstat(file.fileno()).st_size, FOREVER
    start_bytes, _ = _range(byte_range, size_bytes)
    with suppress(FileNotFoundError):
        file = temporary(path).open("rb", buffering=0)
        if os.fstat(file.fileno()).st_size > start_bytes:
            return file, size_bytes, UNCHECKED
        file.close()
    return None
