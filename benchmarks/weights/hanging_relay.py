"""Measure by how much one hanging relay delays the fetch of a delta over loopback.

    python -m benchmarks.weights.hanging_relay [--rounds 20] [--size-mb 8] [--out FILE]

Two servers that hold versions 0 and 1 run in a separate process. A third server accepts connections and never answers. A
client that has version 0 fetches version 1 in two ways: it asks for the newest version, or for number 1. Fetches with and
without the third server take turns. The client has no record of the servers, so each time it may ask the hanging one first.
The delay is the longest fetch with that server minus the median without it. The delay must be at most 0.3 s. The committed
run is benchmarks/results/hanging_relay.json.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.common.machine import about, save
from benchmarks.common.process import next_json, running
from benchmarks.weights.large_versions import write_versions
from shoal.shardcast import Origin, ShardStore, app, public_key_hex, serve
from shoal.shardcast.alone import fetch

TARGET_S = 0.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--size-mb", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=Path, help="for internal use: serve this store")
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serving(arguments.serve))
        return
    with tempfile.TemporaryDirectory() as name:
        rounds = measure(Path(name), arguments.rounds, arguments.size_mb * 10**6)
    result: dict[str, Any] = about() | {"load": os.getloadavg()[0], "summary": summary(rounds), "seconds": rounds}
    sys.stdout.write(json.dumps(result["summary"], indent=1) + "\n")
    if arguments.out:
        save(arguments.out, result)


def measure(folder: Path, rounds: int, size_bytes: int) -> dict[str, list[float]]:
    """Return the seconds of each fetch of version 1."""
    versions = [folder / "model0", folder / "model1"]
    write_versions(versions, size_bytes)
    key = Ed25519PrivateKey.generate()
    origin = Origin(ShardStore(folder / "store"), key, run="hanging", anchor_every=100)
    for version, model in enumerate(versions):
        origin.publish(model, version)
    command = [sys.executable, "-m", __spec__.name, "--serve", folder / "store"]
    took_s: dict[str, list[float]] = {"alone": [], "alone, by number": [], "hanging": [], "hanging, by number": []}
    with running(command, stdout=subprocess.PIPE) as server:
        first, second, hanging = next_json(server)
        for number in range(rounds):
            for name, seconds in took_s.items():
                out = folder / f"{name} {number}"
                fetch([first], out, public_key_hex(key), version=0)
                urls = [first, hanging] if name.startswith("hanging") else [first, second]
                started_s = time.monotonic()
                fetch(urls, out, public_key_hex(key), version=1 if name.endswith("number") else None)
                seconds.append(round(time.monotonic() - started_s, 4))
    return took_s


def summary(took_s: dict[str, list[float]]) -> dict[str, float]:
    figures = {}
    for name in ("", ", by number"):
        usual_s = statistics.median(took_s[f"alone{name}"])
        figures[f"median alone{name}"] = round(usual_s, 3)
        figures[f"median hanging{name}"] = round(statistics.median(took_s[f"hanging{name}"]), 3)
        figures[f"longest hanging{name}"] = max(took_s[f"hanging{name}"])
        figures[f"cost{name}"] = round(max(took_s[f"hanging{name}"]) - usual_s, 3)
    return figures | {"target": TARGET_S}


async def serving(store: Path) -> None:
    ports = [(await serve(app(store)))[1] for _ in range(2)]

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(hang, "127.0.0.1", 0)
    ports.append(silent.sockets[0].getsockname()[1])
    sys.stdout.write(json.dumps([f"http://127.0.0.1:{port}" for port in ports]) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
