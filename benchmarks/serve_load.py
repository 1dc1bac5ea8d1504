"""Concurrent chat streams at `shoal serve` on the tiny model: time to first token and between tokens, against one at a time.

    python benchmarks/serve_load.py                 64 streams
    python benchmarks/serve_load.py --streams 16

The server is a process of its own, with one computing thread; this one is the clients. Each stream asks for 64 tokens,
after a text unlike the model's training, where it seldom ends early. Sequential: the same requests, one after the other.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from machine import describe

RESULT = Path(__file__).parent / "results" / "serve_load.json"
MODEL, TOKENS, START_S = "bundled:tiny", 64, 300.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server, url = start(Path(folder))
        try:
            asyncio.run(streams(url, 4, 4))  # warm-up
            load_before = os.getloadavg()
            together = asyncio.run(streams(url, arguments.streams, arguments.streams))
            alone = asyncio.run(streams(url, arguments.streams, 1))
        finally:
            server.terminate()
            server.wait()
    result = {
        "command": "python " + " ".join([f"benchmarks/{Path(__file__).name}", *sys.argv[1:]]),
        "machine": describe(),
        "load_average_before": load_before,
        "model": MODEL,
        "tokens_asked_per_stream": TOKENS,
        "streams": arguments.streams,
        "together": together,
        "one_at_a_time": alone,
    }
    RESULT.write_text(json.dumps(result) + "\n")
    print({name: {k: v for k, v in result[name].items() if k != "raw"} for name in ("together", "one_at_a_time")})  # noqa: T201


def start(folder: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "shoal", "serve", MODEL, "--open", "--api-only", "--port", "0", "--threads", "1"]
    process = subprocess.Popen([*command, "--dir", str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().split(" at ")[1].split()[0]
    deadline_s = time.monotonic() + START_S
    while httpx.get(f"{url}/health").status_code != 200:
        assert time.monotonic() < deadline_s, "the server does not become ready"
        time.sleep(0.2)
    return process, url


async def streams(url: str, count: int, at_once: int) -> dict[str, Any]:
    slots = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one(number: int) -> tuple[float, list[float]]:
            async with slots:
                return await stream(client, number)

        begun_s = time.perf_counter()
        found = await asyncio.gather(*(one(number) for number in range(count)))
        wall_s = time.perf_counter() - begun_s
    first_ms = [1e3 * first for first, _ in found]
    between_ms = [1e3 * gap for _, gaps in found for gap in gaps]
    tokens = sum(1 + len(gaps) for _, gaps in found)
    return {
        "wall_s": round(wall_s, 2),
        "tokens": tokens,
        "tokens_per_s": round(tokens / wall_s, 1),
        "first_token_ms": percentiles(first_ms),
        "between_tokens_ms": percentiles(between_ms),
        "raw": {
            "first_token_ms": [round(x, 2) for x in first_ms],
            "between_tokens_ms": [round(x, 2) for x in between_ms],
        },
    }


async def stream(client: httpx.AsyncClient, number: int) -> tuple[float, list[float]]:
    """Seconds to the first token, and between the following ones."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"hello world, this is a longer prompt {100 + number}"}],
        "max_tokens": TOKENS,
        "temperature": 1.0,
        "seed": number,
        "stream": True,
    }
    begun_s, arrived = time.perf_counter(), []
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if '"content":' in line and '"role"' not in line:
                arrived.append(time.perf_counter())
    return arrived[0] - begun_s, [later - earlier for earlier, later in zip(arrived, arrived[1:], strict=False)]


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(values, p)), 1) for p in (50, 99)} if values else {}


if __name__ == "__main__":
    main()
