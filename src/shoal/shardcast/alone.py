"""SHARDCAST without a pool: publish a folder, keep a relay, fetch. What `shoal origin PATH` and its siblings do.

    publish("model/", "store/", key)                        into a store, which `serve_origin` or nginx serves
    fetch(["http://relay:8080"], "weights/", public_key)    the newest version: weights/v000003/
    for folder, manifest in watch([...], "weights/", public_key): ...

Called by `cli`, and by whoever has large files to spread and no pool.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.shardcast.fetch.client import Client, Progress
from shoal.shardcast.fetch.sources import Access, FetchError
from shoal.shardcast.format.manifest import Manifest, public_key_hex
from shoal.shardcast.publish.handover import Handover
from shoal.shardcast.publish.origin import Origin
from shoal.shardcast.relay.relay import Relay
from shoal.shardcast.serve.server import app, serve
from shoal.shardcast.store import Store, parse_version

LOOK_AGAIN_S = 0.1
A_DAY_S = 24 * 3600.0


class Address(NamedTuple):
    """Where a server listens; with a TLS context it speaks https."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


def publish(
    path: Path, store: Path | Store, key: Ed25519PrivateKey, *, run: str = "shardcast", version: int | None = None
) -> Manifest:
    """Publish a file, or a folder's files, as `version` (default: the next one). Raises what `Origin.publish` does."""
    origin = Origin(store, key, run=run)
    return origin.publish(path, origin.next_version() if version is None else version)


def fetch(
    urls: Sequence[str],
    out: Path,
    public_key: str,
    *,
    version: int | None = None,
    wait_s: float = 0.0,
    tls: ssl.SSLContext | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Path, Manifest]:
    """Bring a version (default: the newest) to `out`/v000007/. Raises FetchError."""
    client = Client(urls, Access(public_key, tls=tls), out, wait_s=wait_s, timeout_s=A_DAY_S)
    return fetch_with(client, version, progress)


def watch(
    urls: Sequence[str],
    out: Path,
    public_key: str,
    *,
    tls: ssl.SSLContext | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Iterator[tuple[Path, Manifest]]:
    """Every newest version as it comes, for ever. Where one cannot be had, `progress` is told why, and it is tried again."""
    client = Client(urls, Access(public_key, tls=tls), out, wait_s=A_DAY_S, timeout_s=A_DAY_S)
    last: int | None = None
    while True:
        try:
            newest = client.latest()
            if newest is None or newest.version == last:
                time.sleep(LOOK_AGAIN_S)
                continue
            folder, manifest = fetch_with(client, newest.version, progress)
        except FetchError as error:  # told, and waited for: the next version may come whole
            progress(Progress(doing=str(error)))
            time.sleep(1.0)
            continue
        last = manifest.version
        yield folder, manifest


def fetch_with(client: Client, version: int | None, progress: Callable[[Progress], None]) -> tuple[Path, Manifest]:
    """`client.fetch`, telling how it goes a few times a second."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(LOOK_AGAIN_S):
            progress(client.progress)

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    try:
        return client.fetch(version)
    finally:
        done.set()
        telling.join()
        progress(client.progress)


async def serve_origin(
    path: Path, origin: Origin, address: Address, stop: threading.Event, say: Callable[[dict[str, object]], None]
) -> None:
    """Publish what is at `path` and serve it: a file or folder as one version; or every folder `v000007` in it, those
    that appear later, too, and what is written such that it may be read meanwhile (`growing`)."""

    async def live() -> None:
        watched = path.is_dir() and (not any(path.iterdir()) or any(map(_version, path.iterdir())))
        writer = Handover(origin, path, stop.is_set)
        if not watched:
            told(await asyncio.to_thread(origin.publish, path, origin.next_version()))
        while not stop.is_set():
            if watched:
                known = max(origin.published(), default=-1)
                for folder in sorted(folder for folder in path.iterdir() if _version(folder)):
                    if (version := parse_version(folder.name)) is not None and version > known:
                        told(await asyncio.to_thread(origin.publish, folder, version))
                if (growing := writer.begun()) and (manifest := await asyncio.to_thread(writer.follow, growing)):
                    told(manifest)
            await asyncio.sleep(LOOK_AGAIN_S)

    def told(manifest: Manifest) -> None:
        sizes = {part: stream.size_bytes for part, stream in manifest.streams.items()}
        tensors = sum(len(file.tensors) for file in manifest.files)
        facts = {"version": manifest.version, "digest": manifest.digest, "size_bytes": manifest.size_bytes}
        say(facts | {"tensors": tensors} | sizes)

    await _serve(app(origin.store), address, {"key": public_key_hex(origin.key)}, live, say)


async def serve_relay(
    relay: Relay, address: Address, stop: threading.Event, say: Callable[[dict[str, object]], None]
) -> None:
    """Mirror and serve until `stop`; says what becomes whole, and each new trouble."""

    async def live() -> None:
        task = asyncio.ensure_future(relay.mirror())
        seen: set[int] = set()
        trouble: str | None = None
        try:
            while not stop.is_set() and not task.done():
                status = relay.status
                for version in sorted(set(status.versions) - seen):
                    say(
                        {
                            "version": version,
                            "bytes_per_s": {url: round(rate) for url, rate in status.rates_Bps.items()},
                        }
                    )
                seen = set(status.versions)
                if status.last_error and status.last_error != trouble:
                    trouble = status.last_error
                    say({"trouble": trouble})
                await asyncio.sleep(LOOK_AGAIN_S)
            if task.done():
                await task  # raises what ended it
        finally:
            task.cancel()

    await _serve(app(relay.store), address, {}, live, say)


async def _serve(
    application: web.Application,
    address: Address,
    facts: dict[str, object],
    live: Callable[[], Awaitable[None]],
    say: Callable[[dict[str, object]], None],
) -> None:
    runner, bound = await serve(application, address.host, address.port, ssl=address.tls)
    try:
        say({"url": f"{'https' if address.tls else 'http'}://{address.host}:{bound}"} | facts)
        await live()
    finally:
        await runner.cleanup()


def _version(folder: Path) -> bool:
    return folder.is_dir() and parse_version(folder.name) is not None
