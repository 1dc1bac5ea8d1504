"""Measure how abuse of an origin or relay slows honest readers: real processes on loopback, one attack after another.

    python -m benchmarks.trust.abuse_shardcast [--seconds 3] [--size-mb 8] [--only text] [--out FILE]

The servers are `shoal origin` and `shoal relay`. Unlike in a pool, anyone may read from them, so an attacker needs no pass.
Each attack lasts --seconds, at a bounded rate and over a bounded number of connections, from other addresses (127.0.0.2 and
up). Meanwhile one honest client fetches the version again and again. The client is also measured before the first attack and
after the last.

Then a rogue server answers every request with a list of 16 MB (`readers`). A second relay and repeated `shoal fetch`
processes read from it and from the first relay. They are measured with and without the rogue server. `longest_answer_s` is
the second relay's longest time to answer /healthz meanwhile.

A result holds: honest fetches, how many failed, their median and longest seconds, the largest resident memory of the
server's processes together in MiB, their open files, their CPU seconds per second, and how the attack's connections ended.
`slower` is the median fetch divided by the median without an attack. Other load on the machine changes times, but not memory
and open files. The committed run is benchmarks/results/abuse_shardcast.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.common.machine import about, save
from benchmarks.common.process import SHOAL, next_json, running
from benchmarks.trust.shardcast_attacks import attacks
from shoal.shardcast import FetchError
from shoal.shardcast.alone import fetch

START_S = 120.0
ROGUE, ROGUE_S = "a server of huge lists", 20.0


class Server:
    """A server's process with its children."""

    def __init__(self, name: str, url: str, process: subprocess.Popen[str]) -> None:
        self.name, self.url, self.process = name, url, process
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 80

    def all(self) -> list[psutil.Process]:
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.all())


async def measure(server: Server, folder: Path, key: str, seconds: float, attack: str = "") -> dict[str, Any]:
    """Measure one honest client, with or without an attack from another process."""
    stop, took_s = asyncio.Event(), list[float]()

    async def reading() -> int:
        failed = 0
        while not stop.is_set() or not took_s:
            started_s = time.monotonic()
            try:
                await asyncio.to_thread(fetch, [server.url], folder / "out", key, wait_s=10)
            except FetchError:
                failed += 1
            took_s.append(time.monotonic() - started_s)
            shutil.rmtree(folder / "out", ignore_errors=True)
        return failed

    async def watching() -> tuple[int, int]:
        rss_bytes = files = 0
        while not stop.is_set():
            all_of_it = server.all()
            rss_bytes = max(rss_bytes, sum(process.memory_info().rss for process in all_of_it))
            files = max(files, sum(process.num_fds() for process in all_of_it))
            await asyncio.sleep(0.1)
        return rss_bytes, files

    had_s, started_s = server.cpu_s(), time.monotonic()
    tasks = asyncio.create_task(reading()), asyncio.create_task(watching())
    if attack:
        where = ["-m", "benchmarks.trust.shardcast_attacks", attack, server.host, str(server.port), str(seconds)]
        attacker = await asyncio.create_subprocess_exec(sys.executable, *where, stdout=asyncio.subprocess.PIPE)
        ended = json.loads((await attacker.communicate())[0])
    else:
        ended = {}
        await asyncio.sleep(seconds)
    stop.set()
    failed, (rss_bytes, files) = await tasks[0], await tasks[1]
    return {
        "fetches": len(took_s),
        "failed": failed,
        "median_s": round(statistics.median(took_s), 3),
        "longest_s": round(max(took_s), 3),
        "rss_mib": round(rss_bytes / 2**20, 1),
        "open_files": files,
        "cpu": round((server.cpu_s() - had_s) / (time.monotonic() - started_s), 2),
        "attack_ended": ended,
    }


async def measure_readers(server: Server, folder: Path, key: str, seconds: float, *, rogue: bool) -> dict[str, Any]:
    """Measure a relay and successive `shoal fetch` processes that read from `server` and, if `rogue`, a rogue server."""
    where, urls, attacker = free_port(), [server.url], None
    if rogue:
        place = ["-m", "benchmarks.trust.shardcast_attacks", "serve", "127.0.0.1", str(where), str(START_S)]
        attacker = await asyncio.create_subprocess_exec(sys.executable, *place)
        urls = [f"http://127.0.0.1:{where}", *urls]
        await asyncio.sleep(1.0)
    command = ["relay", "--upstream", ",".join(urls), "--key", key, "--store", str(folder / f"relay {rogue}")]
    command += ["--listen", f"127.0.0.1:{free_port()}"]
    answers_s, took_s, reader_bytes, relay_bytes, failed = [0.0], list[float](), 0, 0, 0
    try:
        with started("relay", command, folder / f"relay {rogue}.err", 0) as (relay, _):
            end_s = time.monotonic() + seconds

            async def probing() -> None:
                nonlocal relay_bytes
                while time.monotonic() < end_s:
                    asked_s = time.monotonic()
                    reader, writer = await asyncio.open_connection(relay.host, relay.port)
                    writer.write(b"GET /healthz HTTP/1.1\r\nhost: s\r\nconnection: close\r\n\r\n")
                    await reader.read()
                    writer.close()
                    answers_s.append(time.monotonic() - asked_s)
                    relay_bytes = max(relay_bytes, psutil.Process(relay.process.pid).memory_info().rss)
                    await asyncio.sleep(0.05)

            probe = asyncio.create_task(probing())
            while time.monotonic() < end_s:
                started_s = time.monotonic()
                fetching = [*SHOAL[1:], "fetch", ",".join(urls), "--key", key, "--out", str(folder / "out")]
                process = await asyncio.create_subprocess_exec(
                    sys.executable, *fetching, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
                )
                while process.returncode is None:
                    with contextlib.suppress(psutil.Error):
                        reader_bytes = max(reader_bytes, psutil.Process(process.pid).memory_info().rss)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(process.wait(), 0.02)
                failed += process.returncode != 0
                took_s.append(time.monotonic() - started_s)
                shutil.rmtree(folder / "out", ignore_errors=True)
            await probe
    finally:
        if attacker is not None:
            attacker.terminate()
            await attacker.wait()
    return {
        "fetches": len(took_s),
        "failed": failed,
        "median_s": round(statistics.median(took_s), 3),
        "longest_s": round(max(took_s), 3),
        "reader_rss_mib": round(reader_bytes / 2**20, 1),
        "relay_rss_mib": round(relay_bytes / 2**20, 1),
        "longest_answer_s": round(max(answers_s), 3),
    }


@contextlib.contextmanager
def started(name: str, command: list[str], log: Path, versions: int) -> Iterator[tuple[Server, list[dict[str, Any]]]]:
    """Start a server. Yield it once it has printed its address and completed `versions` versions."""
    with log.open("wb") as errors, running([*SHOAL, *command], stdout=subprocess.PIPE, stderr=errors) as process:
        facts = [next_json(process) for _ in range(1 + versions)]
        yield Server(name, facts[0]["url"], process), facts


async def main(arguments: argparse.Namespace) -> None:
    result: dict[str, Any] = {
        **about(),
        "settings": {"seconds": arguments.seconds, "size_mb": arguments.size_mb, "load": os.getloadavg()[0]},
        "servers": {},
    }
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_bytes(os.urandom(arguments.size_mb << 20))

        command = ["origin", str(folder / "model"), "--store", str(folder / "origin")]
        command += ["--key-file", str(folder / "key.pem"), "--listen", f"127.0.0.1:{free_port()}"]
        first, facts = stack.enter_context(started("origin", command, folder / "origin.err", 1))
        key = facts[0]["key"]
        command = ["relay", "--upstream", first.url, "--key", key, "--store", str(folder / "relay")]
        command += ["--listen", f"127.0.0.1:{free_port()}"]
        second, _ = stack.enter_context(started("relay", command, folder / "relay.err", 1))
        for server in [first, second]:
            rows = {"quiet": await measure(server, folder, key, arguments.seconds)}
            for name in [name for name in attacks("", 0, 0) if arguments.only in name]:
                rows[name] = await measure(server, folder, key, arguments.seconds, name)
                sys.stdout.write(f"{server.name}: {name}: {json.dumps(rows[name])}\n")
                sys.stdout.flush()
            rows["quiet again"] = await measure(server, folder, key, arguments.seconds)
            usual_s = statistics.mean([rows["quiet"]["median_s"], rows["quiet again"]["median_s"]])
            for row in rows.values():
                row["slower"] = round(row["median_s"] / usual_s, 2)
            result["servers"][server.name] = rows
        if arguments.only in ROGUE:
            result["readers"] = {
                name: await measure_readers(second, folder, key, max(arguments.seconds, ROGUE_S), rogue=name == ROGUE)
                for name in ("quiet", ROGUE)
            }
            for name, row in result["readers"].items():
                sys.stdout.write(f"readers: {name}: {json.dumps(row)}\n")
        logged = "".join(path.read_text(errors="replace") for path in folder.glob("*.err"))
    result["logged_bytes"], result["tracebacks"] = len(logged), logged.count("Traceback")
    sys.stdout.write(logged[:2000])
    for server_name, rows in result["servers"].items():
        attacked = [row for name, row in rows.items() if not name.startswith("quiet")] or list(rows.values())
        summary = {
            "slowest": max(row["slower"] for row in attacked),
            "failed": sum(row["failed"] for row in attacked),
            "rss_mib": max(row["rss_mib"] for row in attacked),
            "rss_mib_quiet": rows["quiet"]["rss_mib"],
        }
        result.setdefault("summary", {})[server_name] = summary
        sys.stdout.write(f"{server_name}: {json.dumps(summary)}\n")
    if arguments.out:
        save(arguments.out, result)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each attack")
    parser.add_argument("--size-mb", type=int, default=8, help="size of the version")
    parser.add_argument("--only", default="", help="run only attacks whose name contains this")
    parser.add_argument("--out", type=Path)
    asyncio.run(main(parser.parse_args()))
