"""Make stores without an origin, and send single requests to their server."""

import asyncio
import json
import random
import socket
from pathlib import Path

import aiohttp
from blake3 import blake3
from yarl import URL

from shoal.files import NewFile
from shoal.shardcast import ShardStore, SignedManifest
from shoal.shardcast.manifest import Delta, FileEntry, Manifest, Stream

from .support import KEY, PUBLICATION, RUN, SHARD_BYTES, serving

CONTENT_BYTES = 34_567


def content(size_bytes: int = CONTENT_BYTES) -> bytes:
    return random.Random(0).randbytes(size_bytes)


def cut(data: bytes, shard_bytes: int) -> list[bytes]:
    return [data[i : i + shard_bytes] for i in range(0, len(data), shard_bytes)]


def stream(data: bytes, shard_bytes: int = SHARD_BYTES) -> Stream:
    shards = tuple(blake3(shard).hexdigest() for shard in cut(data, shard_bytes))
    return Stream(size_bytes=len(data), shard_size_bytes=shard_bytes, shards=shards)


def announced(folder: Path, data: bytes, shard_bytes: int = SHARD_BYTES, *, delta: bool = True) -> ShardStore:
    """Make a store that has the manifest of version 7, which is an anchor, but none of its shards."""
    store = ShardStore(folder)
    manifest = Manifest(
        run=RUN,
        publication=PUBLICATION,
        version=7,
        files=(FileEntry(path="model.safetensors", size_bytes=len(data)),),
        content=stream(data, shard_bytes),
        anchor=True,
        delta=Delta(parent=6, parent_digest="0" * 64, stream=stream(data[:15_000])) if delta else None,
        created_s=1.5,
    )
    store.add_manifest(7, SignedManifest.sign(manifest, KEY))
    return store


def put(path: Path, data: bytes) -> None:
    file = NewFile(path)
    file.write(0, data)
    file.commit()
    file.close()


def whole(folder: Path, data: bytes | None = None, shard_bytes: int = SHARD_BYTES) -> ShardStore:
    """Make a store with the manifest and all shards of version 7."""
    data = content() if data is None else data
    store = announced(folder, data, shard_bytes)
    for index, shard in enumerate(cut(data, shard_bytes)):
        put(store.shard_path(7, "full", index), shard)
    for index, shard in enumerate(cut(data[:15_000], SHARD_BYTES)):
        put(store.shard_path(7, "delta", index), shard)
    return store


async def request(url: str, *, method: str = "GET", **options):
    """Send one request, with its path exactly as written. Return (status, headers, body) of the response."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, URL(url, encoded=True), **options) as response,
    ):
        return response.status, response.headers, await response.read()


async def get(store, path: str, *, wait_s=0.1, **options):
    """Serve this store and send one request to the server."""
    async with serving(store, wait_s) as url:
        return await request(url + path, **options)


async def health(url: str) -> dict:
    return json.loads((await request(f"{url}/healthz"))[2])


async def open_raw(url: str, path: str = "", *, receive_bytes: int = 0) -> socket.socket:
    """Open a socket, request `path` if given, and read nothing. `receive_bytes` is the size of the kernel's buffer."""
    raw = socket.socket()
    raw.setblocking(False)
    if receive_bytes:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", URL(url).port))
    if path:
        await loop.sock_sendall(raw, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return raw
