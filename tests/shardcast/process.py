"""One role in a process of its own, for tests that kill it: process.py ROLE JSON. Says on its output how it goes."""

import asyncio
import json
import sys
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

from support import RUN, access, client, contents, origin, relay, serving

from shoal.shardcast import origin as origin_module
from shoal.shardcast.manifest import FileEntry


def say(**facts) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201


async def run_origin(tmp_path: Path, folder: str, version: int, port: int, shards: int = 0) -> None:
    """Publishes a folder; with `shards` as a stream that stops after so many."""
    origin_module.DRAFT_S = 0
    source = origin(tmp_path, clock=time.time)
    async with serving(source.store, port=port):
        if shards:
            await asyncio.to_thread(write_some, source, tmp_path / folder, version, shards)
        else:
            await asyncio.to_thread(source.publish, tmp_path / folder, version)
        say(published=version)
        await asyncio.sleep(60)


def write_some(source, folder: Path, version: int, shards: int) -> None:
    files = contents(folder)
    names = sorted(files)
    data = b"".join(files[name] for name in names)
    entries = [FileEntry(path=name, size_bytes=len(files[name])) for name in names]
    with source.stream(version, entries) as write:
        for index in range(shards):
            write(memoryview(data[index * source.shard_size_bytes : (index + 1) * source.shard_size_bytes]))
        time.sleep(600)  # until it is killed


async def run_relay(tmp_path: Path, upstream: list[str], port: int) -> None:
    mirror = relay(tmp_path, *upstream)
    async with serving(mirror.store, port=port):
        say(run=RUN)
        await mirror.mirror()


async def run_client(tmp_path: Path, urls: list[str]) -> None:
    one = client(tmp_path, *urls, limits={"patience_s": 5.0})
    await asyncio.to_thread(one.fetch)
    say(reused_bytes=one.last_report.reused_bytes)


async def run_reader(tmp_path: Path, urls: list[str], times: int) -> None:
    """Asks for the newest version several times, remembers its servers meanwhile, and then fetches."""
    one = client(tmp_path, *urls)
    had_kib = getrusage(RUSAGE_SELF).ru_maxrss
    for _ in range(times):
        await asyncio.to_thread(one.latest)
    await asyncio.to_thread(one.fetch)
    say(version=one.last_report.version, grew_kib=getrusage(RUSAGE_SELF).ru_maxrss - had_kib)


if __name__ == "__main__":
    settings = json.loads(sys.argv[2])
    assert access().run == RUN
    asyncio.run(globals()[f"run_{sys.argv[1]}"](**{**settings, "tmp_path": Path(settings["tmp_path"])}))
