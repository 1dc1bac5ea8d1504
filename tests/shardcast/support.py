"""Origins, relays and servers on real loopback sockets, small enough for a test."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.shardcast import Client, Origin, Relay, app, public_key_hex, serve

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
PUBLIC_KEY = public_key_hex(KEY)
RUN = "test"
SHARD_BYTES = 10_000


def model_folder(path: Path, seed: int = 0) -> Path:
    """Files of odd sizes: empty, smaller than a shard, several shards, in a subfolder."""
    sizes = {"config.json": 700, "empty.txt": 0, "model.safetensors": 34_567, "tokenizer/vocab.json": 2_345}
    for name, size_bytes in sizes.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(random.Random(f"{seed} {name}").randbytes(size_bytes))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def origin(tmp_path: Path, **options: int) -> Origin:
    return Origin(tmp_path / "origin", KEY, run=RUN, **{"shard_size_bytes": SHARD_BYTES, **options}, clock=lambda: 1.5)


def published(tmp_path: Path, *versions: int, **options: int) -> Origin:
    """An origin store holding these versions; version v was cut from `model_folder(seed=v)`."""
    source = origin(tmp_path, **options)
    for version in versions:
        source.publish(model_folder(tmp_path / f"model{version}", seed=version), version)
    return source


def relay(tmp_path: Path, *upstream: str, name: str = "relay", **options: float) -> Relay:
    return Relay(upstream, tmp_path / name, public_key=PUBLIC_KEY, run=RUN, **{"poll_s": 0.02, **options})


def client(tmp_path: Path, *urls: str, **options: float) -> Client:
    return Client(urls, public_key=PUBLIC_KEY, cache=tmp_path / "cache", run=RUN, **{"timeout_s": 10.0, **options})


@asynccontextmanager
async def serving(store: Path, wait_s: float = 2.0) -> AsyncIterator[str]:
    runner, port = await serve(app(store, wait_s=wait_s))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def mirroring(mirror: Relay) -> AsyncIterator[Relay]:
    task = asyncio.create_task(mirror.mirror())
    try:
        yield mirror
        assert not task.done(), "mirror() ended"
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        await asyncio.sleep(0.01)


def dead_url() -> str:
    """A URL whose port refuses connections."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
