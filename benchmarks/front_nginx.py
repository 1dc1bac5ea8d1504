"""Measures nginx's CPU seconds per GiB of shards with the settings of `shoal origin` against a plain nginx, in turns.

    python benchmarks/front_nginx.py [--rounds 6] [--size-mb 256] [--out benchmarks/results/front_nginx.json]

Needs nginx and curl. The same 4 MiB shards from the same folder to the same curl, 8 connections over loopback:

    plain       sendfile, one worker, nothing else
    ours        `serve/front.py`, as the origin starts it
    nopush      the same with `tcp_nopush on`

A ratio is the median of the rounds' ratios to plain. What the origin's Python adds for lists and manifests is not in here:
see loopback.py.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
from cpu_time import cpu_s
from machine import commit

from shoal.shardcast import Store, app
from shoal.shardcast.serve import front

GIB, MIB = 1 << 30, 1 << 20
SHARD_BYTES = 4 * MIB
PLAIN = (
    "daemon off; user root; worker_processes 1; pid {0}/pid; error_log {0}/log; events {{}} http {{ access_log off; "
)
PLAIN += "sendfile on; server {{ listen 127.0.0.1:{1}; root {2}; }} }}"


async def main(arguments: argparse.Namespace) -> None:
    shards = arguments.size_mb * MIB // SHARD_BYTES
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for index in range(shards):
            path = folder / "store" / "v000000" / "full" / f"{index:05d}.shard"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(SHARD_BYTES))
        (folder / "conf").write_text(PLAIN.format(folder, arguments.port, folder / "store"))
        plain = subprocess.Popen([front.nginx() or "nginx", "-c", str(folder / "conf"), "-p", str(folder)])
        stack.callback(plain.terminate)
        servers = {"plain": (plain.pid, arguments.port)}
        usual = front.SETTINGS
        for name, settings in {
            "ours": usual,
            "nopush": usual.replace("sendfile on;", "sendfile on; tcp_nopush on;"),
        }.items():
            front.SETTINGS = settings
            known = {child.pid for child in psutil.Process().children()}
            store = folder / "store"
            port = await stack.enter_async_context(front.fronted(app(Store(store)), store, "127.0.0.1", 0))
            (pid,) = {child.pid for child in psutil.Process().children()} - known
            servers[name] = pid, port
        took_s: dict[str, list[float]] = {name: [] for name in servers}
        await asyncio.sleep(1.0)
        for _ in range(arguments.rounds):
            for name in random.sample(list(servers), len(servers)):
                pid, port = servers[name]
                had_s = cpu_s(pid)
                url = f"http://127.0.0.1:{port}/v000000/full/[00000-{shards - 1:05d}].shard"
                command = [
                    "curl",
                    "-s",
                    "--fail",
                    "-Z",
                    "--parallel-max",
                    "8",
                    "--no-progress-meter",
                    url,
                    "-o",
                    os.devnull,
                ]
                await asyncio.to_thread(subprocess.run, command, check=True)
                took_s[name].append(round((cpu_s(pid) - had_s) * GIB / (shards * SHARD_BYTES), 4))
    ratios = {
        name: round(statistics.median(a / b for a, b in zip(seconds, took_s["plain"], strict=True)), 2)
        for name, seconds in took_s.items()
    }
    result = {"command": " ".join(["python", *sys.argv]), "commit": commit()}
    result |= {"load": os.getloadavg()[0], "cores": os.cpu_count()}
    result |= {"ratios": ratios, "cpu_s_per_gib": took_s}
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--size-mb", type=int, default=256)
    parser.add_argument("--port", type=int, default=18472, help="of the plain nginx")
    parser.add_argument("--out", type=Path)
    asyncio.run(main(parser.parse_args()))
