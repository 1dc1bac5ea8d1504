"""What open dashboards cost a run: step times of one run of the tiny model, with and without them in turns.

    python benchmarks/idle_dashboards.py                         1,000 pages in background tabs
    python benchmarks/idle_dashboards.py --pages 1000 --turns 5 --turn-s 45

A page in a background tab holds a stream of server-sent events and asks for nothing else; each stream is a connection of its
own that is read to the end. The pages stand for other machines: they share this one in a process that gets only time that
nobody else wants (SCHED_IDLE). Steps during which pages were opened or closed count for neither side. So that all steps
are alike, the run hardly learns and takes every group (`ALIKE`). Every second pair of turns is in the other order.
"""

import argparse
import asyncio
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import psutil
from machine import describe

ROOT = Path(__file__).parent.parent
RESULT = Path(__file__).parent / "results" / "idle_dashboards.json"
START_S = 600.0
SETTLE_S = 4.0
WARM_UP_STEPS = 4
ALIKE = ["--set", "learner.lr=1e-9", "--set", "coordinator.online_filter=false", "--set", "run.steps=100000"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pages", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5, help="of each kind")
    parser.add_argument("--turn-s", type=float, default=45.0)
    parser.add_argument("--of", help=argparse.SUPPRESS)  # this process is the pages
    arguments = parser.parse_args()
    if arguments.of:
        asyncio.run(pages(arguments.of, arguments.pages))
        return
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder) / "run", arguments.pages, arguments.turns, arguments.turn_s)
    result = {
        "command": "python " + " ".join([f"benchmarks/{Path(__file__).name}", *sys.argv[1:]]),
        "machine": describe(),
        "load_average_before": load_before,
        "config": ["configs/tiny.toml", *ALIKE],
        "pages": arguments.pages,
        **found,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print({name: value for name, value in result.items() if name not in ("step_s", "machine")})  # noqa: T201


def measure(out: Path, count: int, turns: int, turn_s: float) -> dict[str, object]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "shoal", "run", str(ROOT / "configs" / "tiny.toml"), "--out", str(out)]
    run = subprocess.Popen([*command, "--dashboard", str(port), *ALIKE], stdout=subprocess.DEVNULL)
    spans: list[tuple[str, float, float]] = []
    used_s: list[float] = []
    read_s: list[float] = []
    try:
        wait(lambda: steps(out) >= WARM_UP_STEPS, "the first steps")
        url = f"http://127.0.0.1:{port}"
        wait(lambda: open_once(url), "the dashboard")  # its server runs in both kinds of turns
        server = next(
            one for one in psutil.process_iter(["cmdline"]) if {"--socket", str(out)} <= set(one.info["cmdline"] or [])
        )
        for turn in range(turns):
            if turn % 2 == 0:
                spans.append(("without", *span(turn_s)))
            with Pages(url, count) as opened:
                before_s = cpu_s(server), cpu_s(opened)
                spans.append(("with", *span(turn_s)))
                used_s.append(cpu_s(server) - before_s[0])
                read_s.append(cpu_s(opened) - before_s[1])
            time.sleep(SETTLE_S)
            if turn % 2 == 1:
                spans.append(("without", *span(turn_s)))
        ends = [json.loads(line)["time_s"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(120)
    took: dict[str, list[float]] = {"without": [], "with": []}
    for before, end in zip(ends, ends[1:], strict=False):
        for kind, first_s, last_s in spans:
            if first_s <= before and end <= last_s:
                took[kind].append(round(end - before, 3))
    medians = {kind: statistics.median(own) for kind, own in took.items()}
    means = {kind: statistics.mean(own) for kind, own in took.items()}
    return {
        "steps": {kind: len(own) for kind, own in took.items()},
        "step_s_median": medians,
        "step_s_mean": {kind: round(value, 3) for kind, value in means.items()},
        "slower_median": round(medians["with"] / medians["without"] - 1, 4),
        "slower_mean": round(means["with"] / means["without"] - 1, 4),
        "slower_mean_95": interval(np.mean, took["with"], took["without"]),
        "slower_median_95": interval(np.median, took["with"], took["without"]),
        "server_cores": round(sum(used_s) / (turns * turn_s), 3),  # of one core, with the pages open
        "pages_cores": round(sum(read_s) / (turns * turn_s), 3),
        "step_s": took,
    }


def interval(middle: Callable[[Any], Any], ones: list[float], others: list[float]) -> list[float]:
    """95 % of bootstrapped ratios of means or medians, less 1."""
    draw = np.random.default_rng(0)
    ratios = [
        middle(draw.choice(ones, len(ones))) / middle(draw.choice(others, len(others))) - 1 for _ in range(10_000)
    ]
    return [round(float(np.percentile(ratios, p)), 4) for p in (2.5, 97.5)]


class Pages:
    """Open pages in a process of their own; entered once all are open."""

    def __init__(self, url: str, count: int) -> None:
        own = [sys.executable, __file__, "--of", url, "--pages", str(count)]
        self.process = subprocess.Popen(own, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> psutil.Process:
        assert self.process.stdout is not None
        told = self.process.stdout.readline()
        assert told.startswith("open"), told
        os.sched_setscheduler(self.process.pid, os.SCHED_IDLE, os.sched_param(0))
        time.sleep(SETTLE_S)
        return psutil.Process(self.process.pid)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()


async def pages(url: str, count: int) -> None:
    """Open streams, say so once each has had its first event, and read until the end."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + 200, count + 200))
    begun = asyncio.Semaphore(50)  # opened at a time
    first = [asyncio.Event() for _ in range(count)]

    async def page(session: aiohttp.ClientSession, number: int) -> None:
        async with begun:
            opened = await (await session.get(f"{url}/api/open")).json()
            response = await session.get(f"{url}/api/events?seen={opened['seen']}")
        async for _ in response.content.iter_any():
            first[number].set()
        raise ConnectionError(f"page {number} lost its stream")

    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
        for number in range(count):  # the group ends with the first stream that is lost
            group.create_task(page(session, number))
        for event in first:
            await event.wait()
        print("open", flush=True)  # noqa: T201


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def span(turn_s: float) -> tuple[float, float]:
    begun_s = time.time()
    time.sleep(turn_s)
    return begun_s, time.time()


def steps(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def open_once(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/open", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def wait(true: object, what: str) -> None:
    deadline_s = time.monotonic() + START_S
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, f"waited {START_S} s for {what}"
        time.sleep(0.5)


if __name__ == "__main__":
    main()
