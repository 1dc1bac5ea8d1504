"""Small origins, relays and servers on real loopback sockets."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import shutil
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.shardcast import (
    Access,
    Client,
    Guard,
    Limits,
    Manifest,
    Origin,
    Relay,
    ShardStore,
    app,
    public_key_hex,
    serve,
)
from shoal.shardcast.connections import PATIENCE, Patience
from shoal.shardcast.fetch.download import Sources
from shoal.shardcast.fetch.source import Incoming, Source, Standing
from shoal.shardcast.manifest import Part, ShardEntry

from . import virtual

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
PUBLIC_KEY = public_key_hex(KEY)
RUN = "test"
PUBLICATION = "a" * 32
SHARD_BYTES = 10_000
SMALL_BYTES = 3_000  # the listings and manifests of a fetch together are smaller, and a shard is larger
PIECE_BYTES = 1_000


def model_folder(path: Path, seed: int = 0) -> Path:
    """Write four files: one empty, one smaller than a shard, one as large as several shards, and one in a subfolder."""
    sizes = {"config.json": 700, "empty.txt": 0, "model.safetensors": 34_567, "tokenizer/vocab.json": 2_345}
    for name, size_bytes in sizes.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(random.Random(f"{seed} {name}").randbytes(size_bytes))
    return path


def weights_folder(path: Path, version: int = 0, *, words: int = 20_000, every: int = 500) -> Path:
    """Write a model of one tensor. With each version, one word in `every` changes."""
    data = bytearray(random.Random("weights").randbytes(2 * words))
    for step in range(1, version + 1):
        for word in range(step % every, words, every):
            data[2 * word] ^= 1
    entry = {"dtype": "BF16", "shape": [words], "data_offsets": [0, len(data)]}
    header = json.dumps({"weight": entry}).encode()
    path.mkdir(parents=True, exist_ok=True)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    (path / "config.json").write_text("{}")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def origin(tmp_path: Path, *, keep: int = 5, **options: Any) -> Origin:
    store = ShardStore(tmp_path / "origin", keep=keep, lease_s=0)
    settings = {"shard_size_bytes": SHARD_BYTES, "anchor_every": 1, "clock": lambda: 1.5, **options}
    source = Origin(store, KEY, run=RUN, **settings)
    store.unlock()  # another process must be able to open it
    return source


def published(tmp_path: Path, *versions: int, **options: Any) -> Origin:
    """Return an origin that has published these versions in full. Version v is `model_folder(seed=v)`."""
    source = origin(tmp_path, **options)
    for version in versions:
        source.publish(model_folder(tmp_path / f"model{version}", seed=version), version)
    return source


def stepped(tmp_path: Path, *versions: int, **options: Any) -> Origin:
    """Return an origin that has published these versions, as deltas if possible. Version v is `weights_folder(v)`."""
    source = origin(tmp_path, **{"anchor_every": 100, **options})
    for version in versions:
        source.publish(weights_folder(tmp_path / f"model{version}", version), version)
    return source


def access(**limits: float) -> Access:
    return Access(PUBLIC_KEY, RUN, Limits(**{"first_rest_s": 0.02, "longest_rest_s": 0.2, **limits}))


def relay(
    tmp_path: Path,
    *upstream: str,
    name: str = "relay",
    keep: int = 5,
    limits: dict[str, float] | None = None,
    **options: Any,
) -> Relay:
    store = ShardStore(tmp_path / name, keep=keep, lease_s=0)
    mirror = Relay(upstream, store, access(**limits or {}), **{"poll_s": 0.02, "longest_pause_s": 0.2, **options})
    store.unlock()
    return mirror


def client(tmp_path: Path, *urls: str, limits: dict[str, float] | None = None, **options: Any) -> Client:
    return Client(urls, access(**limits or {}), tmp_path / "cache", **{"timeout_s": 20.0, **options})


def against(act: Callable[..., Any], *stores: Path, serving: Callable[..., Any] | None = None) -> Any:
    """Serve these stores and run act(*urls) in a thread, as workers do."""
    serve_it = serving or quickly

    async def run() -> Any:
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(serve_it(store)) for store in stores]
            return await asyncio.to_thread(act, *urls)

    return asyncio.run(run())


def fetched(
    tmp_path: Path,
    version: int | None = None,
    *,
    at: Sequence[str] = ("origin",),
    digest: str | None = None,
    serving: Callable[..., Any] | None = None,
    **options: Any,
) -> tuple[Path, Manifest]:
    """Fetch a version (default: the newest) into the cache, from servers of these stores."""
    act = lambda *urls: client(tmp_path, *urls, **options).fetch(version, digest=digest)  # noqa: E731
    result: tuple[Path, Manifest] = against(act, *(tmp_path / name for name in at), serving=serving)
    return result


def mirror_of(tmp_path: Path, name: str) -> Path:
    """Copy the origin's store."""
    return Path(shutil.copytree(tmp_path / "origin", tmp_path / name))


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Iterator[None]:
    """Make writes of shards fail, but not those of small files."""
    real = module.write_all

    def write_all(fd: int, data: bytes, offset_bytes: int) -> None:
        if len(data) > SMALL_BYTES:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, data, offset_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_all", write_all)
        yield


@asynccontextmanager
async def serving(
    store: ShardStore | Path,
    wait_s: float = 2.0,
    port: int = 0,
    *,
    guard: Guard | None = None,
    patience: Patience = PATIENCE,
) -> AsyncIterator[str]:
    application = app(store, wait_s=wait_s, guard=guard)
    runner, bound = await serve(application, port=port, patience=patience, shutdown_s=0.05)
    try:
        yield f"http://127.0.0.1:{bound}"
    finally:
        await runner.cleanup()


def quickly(store: ShardStore | Path) -> AbstractAsyncContextManager[str]:
    """Serve a store. A request for a missing shard waits only briefly."""
    return serving(store, wait_s=0.1)


@asynccontextmanager
async def answering(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int = 0
) -> AsyncIterator[str]:
    """Run a server that answers every request with `answer`."""
    application = web.Application()
    application.add_routes([web.get("/{any:.*}", answer)])
    runner, bound = await serve(application, port=port, shutdown_s=0.05)
    try:
        yield f"http://127.0.0.1:{bound}"
    finally:
        await runner.cleanup()


def plainly(folder: Path) -> AbstractAsyncContextManager[str]:
    """Serve a folder as plain files, as nginx does."""

    async def answer(request: web.Request) -> web.StreamResponse:
        path = folder / request.path.lstrip("/")
        return web.FileResponse(path) if path.is_file() else web.Response(status=404)

    return answering(answer)


class Middle:
    """A proxy for another server that records requests, and slows, changes or withholds responses."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.url = ""
        self.requests: list[tuple[str, str]] = []  # path and Range header of each request for a shard
        self.sent_bytes = 0  # of all shards together
        self.rate_Bps = inf  # for each shard
        self.cut_after_bytes = inf  # after this many sent bytes, connections break
        self.hold_after_bytes = inf  # after this many sent bytes, nothing more is sent until this is raised
        self.passes_ranges = True
        self.silent: Callable[[str], bool] = lambda path: False  # says whether a path gets no response
        self.refuse: Callable[[str], web.Response | None] = lambda path: None
        self.change: Callable[[str, bytes], bytes] = lambda path, data: data

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path, wanted = request.path, request.headers.get("Range", "")
        is_shard = path.endswith(".shard")
        if is_shard:
            self.requests.append((request.path_qs, wanted))
        if self.silent(path):
            await asyncio.sleep(60)
        if refusal := self.refuse(path):
            return refusal
        headers = {"Range": wanted} if wanted and self.passes_ranges else {}
        try:
            async with aiohttp.ClientSession() as session, session.get(self.target + path, headers=headers) as upstream:
                data = self.change(path, await upstream.read())
                kept = {
                    name: upstream.headers[name]
                    for name in ("Content-Range", "Retry-After")
                    if name in upstream.headers
                }
                response = web.StreamResponse(status=upstream.status, headers=kept)
        except aiohttp.ClientError:
            return web.Response(status=502)
        response.content_length = len(data)
        await response.prepare(request)
        for at in range(0, len(data), PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            if is_shard:
                await asyncio.sleep(len(piece) / self.rate_Bps)
                while self.sent_bytes >= self.hold_after_bytes:
                    await asyncio.sleep(0.01)
                if self.sent_bytes + len(piece) > self.cut_after_bytes:
                    assert request.transport is not None
                    request.transport.close()
                    return response
                self.sent_bytes += len(piece)
            try:
                await response.write(piece)
            except ConnectionError:  # the reader left
                return response
        return response

    def requested_bytes(self, since: int = 0, shard_bytes: int = SHARD_BYTES) -> int:
        """Return how many bytes all but the first `since` requests asked for. All shards must have full size."""
        return sum(shard_bytes - start for start in self.starts()[since:])

    def starts(self) -> list[int]:
        """Return the first requested byte of each request for a shard."""
        return [int(wanted.removeprefix("bytes=").rstrip("-") or 0) for _, wanted in self.requests]


@asynccontextmanager
async def between(target: str, port: int = 0, **settings: Any) -> AsyncIterator[Middle]:
    middle = Middle(target)
    for name, value in settings.items():
        assert hasattr(middle, name)
        setattr(middle, name, value)
    async with answering(middle.answer, port) as middle.url:
        yield middle


@asynccontextmanager
async def mirroring(mirror: Relay) -> AsyncIterator[Relay]:
    task = asyncio.create_task(mirror.mirror())
    try:
        yield mirror
        assert not task.done(), "mirror() must not end by itself"
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true in time"
        await asyncio.sleep(0.01)


async def versions_at(url: str) -> list[int]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/versions.json") as response:
        versions: list[int] = (await response.json())["versions"]
        return versions


def dead_url() -> str:
    """Return a URL whose port refuses connections."""
    return f"http://127.0.0.1:{free_port()}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def flip_bit(path: Path) -> None:
    path.write_bytes(flipped(path.read_bytes()))


def flipped(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


def read_and_written_bytes() -> tuple[int, int]:
    """Return how many bytes this process has read and written (Linux only). What sendfile sends counts as both."""
    lines = Path("/proc/self/io").read_text().splitlines()
    figures = {name: int(figure) for name, figure in (line.split(": ") for line in lines)}
    return figures["rchar"], figures["wchar"]


def cached(tmp_path: Path) -> list[str]:
    folder = tmp_path / "cache"
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.exists() else []


class Known(Standing):
    """A standing with fixed speed and success rate."""

    def __init__(self, speed_Bps: float | None, success: float = 1.0) -> None:
        super().__init__()
        self._always = speed_Bps, success

    def speed_Bps(self) -> float | None:
        return self._always[0]

    def success(self) -> float:
        return self._always[1]


class Stub(Source):
    """A source without a network. For each requested shard it follows the next entry of its script. When no entry is
    left, it delivers at once."""

    def __init__(self, url: str, *script: Exception | float, standing: Standing | None = None, pieces: int = 1) -> None:
        """An exception in `script` is raised; a number is how many seconds it takes to deliver a shard in `pieces`."""
        super().__init__(None, url, Access(PUBLIC_KEY, RUN))  # type: ignore[arg-type]
        self.standing = standing or self.standing
        self.standing._clock = virtual.now_s
        self.script, self.pieces = list(script), pieces
        self.requests: list[int] = []
        self.running = self.max_running = 0

    async def shard(self, version: int, part: Part, incoming: Incoming) -> None:
        self.requests.append(incoming.shard.index)
        self.running += 1
        self.max_running = max(self.running, self.max_running)
        try:
            step = self.script.pop(0) if self.script else 0.0
            if isinstance(step, Exception):
                raise step
            rest = shard_data(incoming.shard.index)[incoming.size_bytes :]
            piece_bytes = -(-len(rest) // self.pieces)
            for at in range(0, len(rest), piece_bytes):
                await asyncio.sleep(step / self.pieces)
                incoming.take(rest[at : at + piece_bytes])
        finally:
            self.running -= 1


def shard_data(index: int) -> bytes:
    return random.Random(index).randbytes(100)


def shard(index: int) -> ShardEntry:
    return ShardEntry(index, 100, blake3(shard_data(index)).hexdigest())


def choosing(*stubs: Stub, **limits: float) -> Sources:
    """Return the Sources that choose among these stubs."""
    sources = Sources(
        Access(PUBLIC_KEY, RUN, Limits(**limits)),
        None,  # type: ignore[arg-type]
        [],
        on_failure=lambda error: None,
    )
    sources.sources = list(stubs)
    return sources


class Memory:
    """A sink for one shard."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.done_count = 0

    def write(self, offset_bytes: int, data: bytes) -> None:
        self.data[offset_bytes:] = data

    def restart(self) -> None:
        self.data.clear()

    def done(self) -> None:
        self.done_count += 1

    def close(self) -> None: ...
