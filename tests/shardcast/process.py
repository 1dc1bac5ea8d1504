"""One role in a process of its own, for tests that kill it: process.py ROLE JSON. Says on its output how it goes."""

import asyncio
import json
import sys
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.shardcast.support import RUN, access, client, origin, relay, serving  # noqa: E402


def say(**facts) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201


async def run_origin(tmp_path: Path, folder: str, version: int, port: int) -> None:
    source = origin(tmp_path, clock=time.time)
    async with serving(source.store, port=port):
        await asyncio.to_thread(source.publish, tmp_path / folder, version)
        say(published=version)
        await asyncio.sleep(60)


async def run_relay(tmp_path: Path, upstream: list[str], port: int) -> None:
    mirror = relay(tmp_path, *upstream)
    async with serving(mirror.store, port=port):
        say(run=RUN)
        await mirror.mirror()


async def run_client(tmp_path: Path, urls: list[str]) -> None:
    one = client(tmp_path, *urls, limits={"patience_s": 5.0})
    await asyncio.to_thread(one.fetch)
    say(reused_bytes=one.progress.reused_bytes)


async def run_reader(tmp_path: Path, urls: list[str], times: int) -> None:
    """Asks for the newest version several times, remembers its servers meanwhile, and then fetches."""
    one = client(tmp_path, *urls)
    had_kib = getrusage(RUSAGE_SELF).ru_maxrss
    for _ in range(times):
        await asyncio.to_thread(one.latest)
    await asyncio.to_thread(one.fetch)
    say(version=one.progress.version, grew_kib=getrusage(RUSAGE_SELF).ru_maxrss - had_kib)


if __name__ == "__main__":
    settings = json.loads(sys.argv[2])
    assert access().run == RUN
    asyncio.run(globals()[f"run_{sys.argv[1]}"](**{**settings, "tmp_path": Path(settings["tmp_path"])}))
