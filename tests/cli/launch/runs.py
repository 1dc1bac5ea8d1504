"""Whole runs as processes of `shoal run`, for the slow tests."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

CONFIGS = Path(__file__).parents[3] / "configs"
DEADLINE_S = 900.0  # for a whole run on a very busy machine; on a quiet one it takes under a minute
# The gain in held-out greedy accuracy that 24 steps must reach. Honest runs gain about twice as much, and runs that do not
# learn gain exactly 0. test_swarm.test_the_bound_separates_learning_runs_from_non_learning_runs checks both facts for the
# runs in benchmarks/results/.
MIN_GAIN = 0.1


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "shoal", "run", *map(str, arguments)]


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    """Start a run of configs/tiny.toml in `out`."""
    argv = command(CONFIGS / "tiny.toml", "--out", out, *more)
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def refused(*arguments: object) -> tuple[int, str]:
    """Try to start a run that must be refused. Return its exit status and output."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return done.returncode, done.stdout + done.stderr


def children(out: Path) -> dict[str, int]:
    """Return the process ids of the nodes of the run in `out`, by name. Find them by the logs to which they write.

    Process titles are not used, because they may be cut short.
    """
    pids = {}
    for pid in psutil.pids():
        try:
            log = Path(f"/proc/{pid}/fd/1").readlink()
        except OSError:  # it has ended
            continue
        if log.parent == out / "logs":
            pids[log.stem] = pid
    return pids


def trained_steps(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def summary_of(out: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def gain(summary: dict[str, Any]) -> float:
    """Return how much held-out greedy accuracy the run gained."""
    return float(summary["heldout_after"]["greedy"] - summary["heldout_before"]["greedy"])
