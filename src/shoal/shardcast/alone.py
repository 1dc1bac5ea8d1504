"""SHARDCAST without a pool: publish a folder, run a relay, fetch.

    publish(Path("model"), Path("store"), key)                    # `serve_origin` or nginx serves the store
    fetch(["http://relay:8080"], Path("weights"), public_key)     # the newest version, into weights/v000003/
    for folder, manifest in watch([...], Path("weights"), public_key): ...

`shoal origin PATH`, `shoal relay --upstream` and `shoal fetch` do the same from a terminal.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.shardcast.fetch import FetchError
from shoal.shardcast.fetch.client import Client, Progress
from shoal.shardcast.fetch.source import Access
from shoal.shardcast.manifest import Manifest, parse_version, public_key_hex
from shoal.shardcast.origin import Origin, check_apart
from shoal.shardcast.relay import Relay
from shoal.shardcast.server import app, serve, url_of
from shoal.shardcast.store import ShardStore

POLL_S = 0.1
IDLE_S = 0.5  # pause between checks of `stop` when no folder is watched
DAY_S = 24 * 3600.0


def publish(
    path: Path, store: Path | ShardStore, key: Ed25519PrivateKey, *, run: str = "shardcast", version: int | None = None
) -> Manifest:
    """Publish a file or a folder as `version` (default: the next one). Raise what `Origin.publish` raises."""
    origin = Origin(store, key, run=run)
    try:
        return origin.publish(path, origin.next_version() if version is None else version)
    finally:
        origin.store.unlock()


def fetch(
    urls: Sequence[str],
    out: Path,
    public_key: str,
    *,
    version: int | None = None,
    wait_s: float = 0.0,
    timeout_s: float = DAY_S,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Path, Manifest]:
    """Fetch a version (default: the newest) into `out`/v000007/. Raise FetchError, at the latest after `timeout_s`."""
    client = Client(urls, Access(public_key), out, wait_s=wait_s, timeout_s=timeout_s)
    return fetch_with(client, version, progress)


def watch(
    urls: Sequence[str],
    out: Path,
    public_key: str,
    *,
    timeout_s: float = DAY_S,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Iterator[tuple[Path, Manifest]]:
    """Yield new versions as they appear, forever. Never yield an older version after a newer one. If a fetch fails or
    exceeds `timeout_s`, report it to `progress` and retry."""
    client = Client(urls, Access(public_key), out, wait_s=DAY_S, timeout_s=timeout_s)
    last: Manifest | None = None
    while True:
        try:
            newest = client.latest()
            if newest is None or (last and not newest.supersedes(last)):
                time.sleep(POLL_S)
                continue
            folder, manifest = fetch_with(client, None, progress)
        except FetchError as error:
            progress(Progress(doing=str(error)))
            time.sleep(1.0)
            continue
        last = manifest
        yield folder, manifest


def fetch_with(client: Client, version: int | None, progress: Callable[[Progress], None]) -> tuple[Path, Manifest]:
    """Call `client.fetch` and report progress several times a second."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(POLL_S):
            progress(client.progress)

    reporting = threading.Thread(target=report, daemon=True)
    reporting.start()
    try:
        return client.fetch(version)
    finally:
        done.set()
        reporting.join()
        progress(client.progress)


async def serve_origin(
    path: Path, origin: Origin, listen: tuple[str, int], stop: threading.Event, say: Callable[[dict[str, object]], None]
) -> None:
    """Publish `path` and serve it until `stop` is set. If `path` is a folder that is empty or holds version folders
    (v000007), publish each version folder, including those added later. Otherwise publish `path` (a file or a folder)
    as one version. Raise what `Origin.publish` raises."""
    check_apart(path, origin.store.path)

    async def publish_all() -> None:
        watched = path.is_dir() and (not any(path.iterdir()) or any(map(_version, path.iterdir())))
        if not watched:
            report(await asyncio.to_thread(origin.publish, path, origin.next_version()))
        while not stop.is_set():
            origin.state()
            if watched:
                newest = max(origin.published(), default=-1)
                for folder in sorted(folder for folder in path.iterdir() if _version(folder)):
                    if (version := parse_version(folder.name)) is not None and version > newest:
                        try:
                            report(await asyncio.to_thread(origin.publish, folder, version))
                        except FileNotFoundError:  # its writer removes versions once it has newer ones
                            if not any(other.name > folder.name and _version(other) for other in path.iterdir()):
                                raise
            await asyncio.sleep(POLL_S if watched else IDLE_S)

    def report(manifest: Manifest) -> None:
        sizes = {part: stream.size_bytes for part, stream in manifest.streams.items()}
        facts = {"version": manifest.version, "digest": manifest.digest, "size_bytes": manifest.size_bytes}
        say(facts | sizes)

    await _serve(app(origin.store), listen, {"key": public_key_hex(origin.key)}, publish_all, say)


async def serve_relay(
    relay: Relay, listen: tuple[str, int], stop: threading.Event, say: Callable[[dict[str, object]], None]
) -> None:
    """Mirror and serve until `stop` is set. Report each version that becomes complete, and each new error."""

    async def mirror() -> None:
        task = asyncio.ensure_future(relay.mirror())
        seen: set[int] = set()
        error: str | None = None
        try:
            while not stop.is_set() and not task.done():
                status = relay.status
                for version in sorted(set(status.versions) - seen):
                    rates_Bps = status.arrival.rates_Bps if status.arrival else {}
                    say({"version": version, "bytes_per_s": {url: round(rate) for url, rate in rates_Bps.items()}})
                seen = set(status.versions)
                if status.last_error and status.last_error != error:
                    error = status.last_error
                    say({"error": error})
                await asyncio.sleep(POLL_S)
            if task.done():
                await task  # raises its exception
        finally:
            task.cancel()

    await _serve(app(relay.store), listen, {}, mirror, say)


async def _serve(
    application: web.Application,
    listen: tuple[str, int],
    facts: dict[str, object],
    work: Callable[[], Awaitable[None]],
    say: Callable[[dict[str, object]], None],
) -> None:
    runner, bound = await serve(application, *listen)
    try:
        say({"url": url_of(listen[0], bound)} | facts)
        await work()
    finally:
        await runner.cleanup()


def _version(folder: Path) -> bool:
    return folder.is_dir() and parse_version(folder.name) is not None
