"""Measure how an origin's and a client's cost grows with a version's size. Extrapolate to 62 GB (31e9 words of bf16).

    python -m benchmarks.weights.large_versions [--sizes-mb 256 1024] [--gb 62] [--label name] [--out FILE]

A version is one safetensors file of bf16 words. Between two versions 0.3 % of the words change by one unit in the last
place. Version 0 is an anchor, versions 1 to 3 are deltas. Each operation's result has the CPU seconds of its process (all
threads, user and system). It also has the bytes that the process read from and wrote to files (/proc/self/io on Linux), as a
multiple of the version's size.

    publish         `Origin.publish` of versions 1 to 3, after version 0; the median
    one behind      `fetch` of version 1 by a client that holds version 0
    two behind      `fetch` of version 3 by a client that holds version 1
    newcomer        `fetch` of version 3 by a client that holds nothing: the anchor and three deltas

A server of plain files in another process sends the shards. Its CPU time does not count. The cost of 62 GB is the slope
between the smallest and the largest size, times 62 GB. CPU seconds depend less on other load than wall time does. A second
thread hashes, so on a quiet machine wall time is shorter than CPU time, unless the disk is the bottleneck.
"""

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.common.machine import RESULTS, about, save
from benchmarks.common.process import running
from shoal.shardcast import Origin, ShardStore, public_key_hex
from shoal.shardcast.alone import fetch

MB, GB = 10**6, 10**9
TENSOR_WORDS = 16 << 20
CHANGED = 0.003
VERSIONS = 4
START_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes-mb", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--gb", type=float, default=62.0, help="size to extrapolate to")
    parser.add_argument("--label", default="", help="what was measured, for the results file")
    parser.add_argument("--port", type=int, default=18471, help="port of the server of plain files")
    parser.add_argument("--out", type=Path, default=RESULTS / "large_versions.json")
    arguments = parser.parse_args()
    result: dict[str, Any] = about() | {"label": arguments.label}
    result |= {"load": os.getloadavg()[0], "sizes": []}
    for size_mb in arguments.sizes_mb:
        with tempfile.TemporaryDirectory() as name:
            result["sizes"].append(measure(Path(name), size_mb * MB, arguments.port))
        result["extrapolated"] = extrapolated(result["sizes"], arguments.gb * GB)
        save(arguments.out, result)
        sys.stdout.write(json.dumps(result["sizes"][-1]) + "\n")
    sys.stdout.write(json.dumps(result["extrapolated"], indent=1) + "\n")


def measure(folder: Path, size_bytes: int, port: int) -> dict[str, Any]:
    versions = [folder / f"model{version}" for version in range(VERSIONS)]
    size_bytes = write_versions(versions, size_bytes)
    key = Ed25519PrivateKey.generate()
    origin = Origin(ShardStore(folder / "store", keep=VERSIONS), key, run="large", anchor_every=100)
    origin.publish(versions[0], 0)
    published = [cost(lambda v=v: origin.publish(versions[v], v), size_bytes) for v in range(1, VERSIONS)]  # type: ignore[misc]
    steps = {"publish": {name: statistics.median(step[name] for step in published) for name in published[0]}}
    command = [sys.executable, "-m", "http.server", port, "--bind", "127.0.0.1", "--directory", folder / "store"]
    with running(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        url, public_key = f"http://127.0.0.1:{port}", public_key_hex(key)

        def get(out: str, version: int) -> dict[str, float]:
            return cost(lambda: fetch([url], folder / out, public_key, version=version, wait_s=START_S), size_bytes)

        steps["newcomer"] = get("new", 3)
        get("old", 0)
        steps["one behind"] = get("old", 1)
        steps["two behind"] = get("old", 3)
    delta_bytes = sum(path.stat().st_size for path in (folder / "store" / "v000001" / "delta").iterdir())
    return {"size_bytes": size_bytes, "delta_bytes": delta_bytes, "steps": steps}


def write_versions(folders: list[Path], size_bytes: int) -> int:
    """Write the versions. Return the size of each."""
    noise = np.random.default_rng(0)
    counts = [TENSOR_WORDS] * (size_bytes // 2 // TENSOR_WORDS) + [size_bytes // 2 % TENSOR_WORDS]
    ends = np.cumsum([0, *counts]) * 2
    entries = {
        f"layer{index}": {"dtype": "BF16", "shape": [count], "data_offsets": [int(ends[index]), int(ends[index + 1])]}
        for index, count in enumerate(counts)
    }
    header = json.dumps(entries).encode()
    files = []
    for folder in folders:
        folder.mkdir()
        files.append((folder / "model.safetensors").open("wb"))
        files[-1].write(struct.pack("<Q", len(header)) + header)
    for count in counts:
        words = noise.standard_normal(count, np.float32).view(np.uint32) >> 16
        words = words.astype("<u2")
        for file in files:
            file.write(words.data)
            words[noise.integers(0, count, int(CHANGED * count))] += 1
    for file in files:
        file.close()
    return (folders[0] / "model.safetensors").stat().st_size


def cost(act: Callable[[], object], size_bytes: int) -> dict[str, float]:
    """Return CPU and wall seconds, and the bytes read and written, divided by `size_bytes`."""
    had, cpu_s, wall_s = file_bytes(), time.process_time(), time.monotonic()
    act()
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    read, written = (after - before for before, after in zip(had, file_bytes(), strict=True))
    row = {"cpu_s": cpu_s, "wall_s": wall_s, "read": read / size_bytes, "written": written / size_bytes}
    return {name: round(figure, 3) for name, figure in row.items()}


def file_bytes() -> tuple[int, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    figures = {name: int(figure) for name, figure in (line.split(": ") for line in lines)}
    return figures["rchar"], figures["wchar"]


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "unknown")


def extrapolated(sizes: list[dict[str, Any]], size_bytes: float) -> dict[str, dict[str, float]]:
    """Return CPU seconds, and GB read and written, for one version of `size_bytes`."""
    first, last = sizes[0], sizes[-1]
    row = {}
    for name, step in last["steps"].items():
        less_s, less_bytes = (first["steps"][name]["cpu_s"], first["size_bytes"]) if len(sizes) > 1 else (0.0, 0)
        slope = (step["cpu_s"] - less_s) / (last["size_bytes"] - less_bytes)
        row[name] = {
            "cpu_s": round(slope * size_bytes, 1),
            "read_gb": round(step["read"] * size_bytes / GB, 1),
            "written_gb": round(step["written"] * size_bytes / GB, 1),
        }
    return row


if __name__ == "__main__":
    main()
