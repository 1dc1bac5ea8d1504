"""Run an origin, relay or client in a process that a test can kill: process.py ROLE JSON. It prints JSON lines."""

import asyncio
import json
import sys
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.shardcast.support import RUN, access, client, origin, relay, serving  # noqa: E402


def report(**facts) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201


async def run_origin(tmp_path: Path, folder: str, version: int, port: int) -> None:
    source = origin(tmp_path, clock=time.time)
    async with serving(source.store, port=port):
        await asyncio.to_thread(source.publish, tmp_path / folder, version)
        report(published=version)
        await asyncio.sleep(60)


async def run_relay(tmp_path: Path, upstream: list[str], port: int) -> None:
    mirror = relay(tmp_path, *upstream)
    async with serving(mirror.store, port=port):
        report(run=RUN)
        await mirror.mirror()


async def run_client(tmp_path: Path, urls: list[str]) -> None:
    reader = client(tmp_path, *urls, limits={"patience_s": 5.0})
    await asyncio.to_thread(reader.fetch)
    report(reused_bytes=reader.progress.reused_bytes)


async def run_reader(tmp_path: Path, urls: list[str], times: int) -> None:
    """Query the newest version several times, then fetch it."""
    reader = client(tmp_path, *urls)
    before_kib = getrusage(RUSAGE_SELF).ru_maxrss
    for _ in range(times):
        await asyncio.to_thread(reader.latest)
    await asyncio.to_thread(reader.fetch)
    report(version=reader.progress.version, grew_kib=getrusage(RUSAGE_SELF).ru_maxrss - before_kib)


if __name__ == "__main__":
    settings = json.loads(sys.argv[2])
    assert access().run == RUN
    asyncio.run(globals()[f"run_{sys.argv[1]}"](**{**settings, "tmp_path": Path(settings["tmp_path"])}))
