"""Executions a second on one core: the sandbox's warm pool, each tier, against bare `python -I -S -c` without any sandbox.

    python benchmarks/sandbox_speed.py [--rounds 20] [--runs 20]

This process and all it starts are bound to one core. Every round runs the same small program `--runs` times in each way, the
ways in turns, one execution at a time; the first execution of each way is not counted. `cpu_ms` is what parent, servers and
programs used together, so it says more than wall time where others use the machine too. Medians over the rounds.
Writes benchmarks/results/sandbox_speed.json with every round and prints it.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.sandbox import TIERS, Program, Sandbox, interpreter, problem

SOURCE = "a, b = 0, 1\nfor _ in range(int(input())): a, b = b, a + b\nprint(a)"
STDIN, EXPECTED = b"10\n", b"55\n"
PYTHON = str(Path(sys.executable).resolve())
TICKS_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--runs", type=int, default=20, help="executions of each way in a round")
    arguments = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    boxes = {tier: Sandbox(tier) for tier in TIERS if not problem(tier)}
    ways: dict[str, Callable[[], bytes]] = {"bare": bare} | {
        tier: lambda box=box: box.run(Program(SOURCE, STDIN)).stdout for tier, box in boxes.items()
    }
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    loads = [os.getloadavg()[0]]
    for way in ways.values():
        assert way() == EXPECTED
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            rounds[name].append(measure(way, arguments.runs))
        loads.append(os.getloadavg()[0])
    for box in boxes.values():
        box.close()
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe(),
        "load_average": [round(min(loads), 1), round(max(loads), 1)],
        "unavailable": {tier: problem(tier) for tier in TIERS if tier not in boxes},
        "median": {name: summary(figures, rounds["bare"]) for name, figures in rounds.items()},
        "rounds": rounds,
    }
    text = json.dumps(result, indent=1)
    (Path(__file__).parent / "results" / "sandbox_speed.json").write_text(text + "\n")
    print(text)  # noqa: T201


def bare() -> bytes:
    command = [PYTHON, "-I", "-S", "-c", SOURCE]
    return subprocess.run(command, input=STDIN, capture_output=True, env={}, check=True).stdout


def measure(way: Callable[[], bytes], runs: int) -> dict[str, float]:
    started, cpu_s = time.perf_counter(), all_cpu_s()
    for _ in range(runs):
        assert way() == EXPECTED
    return {
        "per_s": round(runs / (time.perf_counter() - started), 1),
        "cpu_ms": round((all_cpu_s() - cpu_s) / runs * 1000, 3),
    }


def all_cpu_s() -> float:
    """CPU time of this process, its ended children, and its living descendants with their ended children."""
    own = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own + sum(living_cpu_s(child) for child in children(os.getpid()))


def living_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS_S + sum(living_cpu_s(child) for child in children(pid))


def children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def summary(figures: list[dict[str, float]], bare: list[dict[str, float]]) -> dict[str, float]:
    medians = {key: statistics.median(figure[key] for figure in figures) for key in ("per_s", "cpu_ms")}
    ratios = [own["per_s"] / other["per_s"] for own, other in zip(figures, bare, strict=True)]
    return medians | {"times_bare": round(statistics.median(ratios), 2)}


def describe() -> dict[str, Any]:
    from machine import commit  # it imports torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "os": platform.freedesktop_os_release().get("PRETTY_NAME", ""),
        "kernel": platform.release(),
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": interpreter(),
        "root": os.getuid() == 0,
        "commit": commit(),
    }


if __name__ == "__main__":
    main()
