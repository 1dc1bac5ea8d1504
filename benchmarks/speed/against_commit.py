"""Compare this tree's speed with that of another commit: whole runs of a config, and SHARDCAST over loopback.

    git worktree add ../before COMMIT
    python -m benchmarks.speed.against_commit ../before --rounds 3 [--jobs tiny shardcast] [--set validator.count=2]

Each round runs every job once with each tree's sources. The order of the trees alternates between rounds, so that both meet
the same state of the machine. Writes benchmarks/results/against_commit.json (machine, commits, every figure) and prints each
figure's median per tree and the median of the rounds' ratios.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common.machine import RESULTS, ROOT, about, commit, save
from benchmarks.common.process import SHOAL, next_json, running

SIZE_BYTES = 512 << 20
Figures = dict[str, float]
Job = Callable[[Path, int, list[str]], Figures]  # tree, number of the round, settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the other commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="for the runs of both trees")
    arguments = parser.parse_args()
    trees = {"before": arguments.before.resolve(), "after": ROOT}
    commits = {name: commit(tree) for name, tree in trees.items()}
    result = {
        **about(),
        "commits": commits,
        "set": arguments.set,
        "rounds": [],
    }
    for number in range(arguments.rounds):
        for job in arguments.jobs:
            order = list(trees) if number % 2 == 0 else list(trees)[::-1]
            figures = {name: JOBS[job](trees[name], number, arguments.set) for name in order}
            result["rounds"].append({"job": job} | figures)
            save(RESULTS / "against_commit.json", result)
            sys.stdout.write(f"{job} {number}: {figures}\n")
            sys.stdout.flush()
    for job in arguments.jobs:
        rounds = [row for row in result["rounds"] if row["job"] == job]
        for figure in rounds[0]["before"]:
            before, after = ([row[name][figure] for row in rounds] for name in ("before", "after"))
            ratios = [b / a for a, b in zip(before, after, strict=True) if a]
            ratio = statistics.median(ratios) if ratios else float("nan")
            medians = f"{statistics.median(before):.4g} | {statistics.median(after):.4g}"
            sys.stdout.write(f"| {job} {figure} | {medians} | {ratio:.3f} |\n")


def swarm(config: str) -> Job:
    """Return a job that runs a config with the round's number as seed."""

    def run(tree: Path, seed: int, settings: list[str]) -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            chosen = [word for setting in (f"run.seed={seed}", *settings) for word in ("--set", setting)]
            _shoal(tree, "run", str(tree / "configs" / f"{config}.toml"), *chosen, "--out", str(out))
            summary = json.loads((out / "summary.json").read_text())
            disk = sum(path.stat().st_blocks * 512 for path in out.rglob("*") if path.is_file())
        return {
            "wall_s": summary["wall_s"],
            "sampled_after": summary["heldout_after"]["sampled"],
            "greedy_after": summary["heldout_after"]["greedy"],
            "peak_gib": summary["peak_together_bytes"] / 2**30,
            "rejected": float(sum(summary["rejected"].values())),
            "left_on_disk_gib": disk / 2**30,
        }

    return run


def shardcast(tree: Path, seed: int, settings: list[str]) -> Figures:
    """Send 512 MiB from an origin to one client. Return wall seconds of the fetch and CPU seconds of each process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        with (folder / "model" / "weights.bin").open("wb") as file:
            for _ in range(SIZE_BYTES >> 20):
                file.write(os.urandom(1 << 20))
        argv = ["origin", folder / "model", "--store", folder / "store", "--key-file", folder / "key.pem"]
        with running([*SHOAL, *argv], env=_environment(tree), stdout=subprocess.PIPE) as origin:
            facts = next_json(origin)
            next_json(origin)  # it has published the version
            started_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
            _shoal(tree, "fetch", facts["url"], "--key", facts["key"], "--out", str(folder / "out"))
            wall_s, after = time.monotonic() - started_s, resource.getrusage(resource.RUSAGE_CHILDREN)
            client_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        whole = resource.getrusage(resource.RUSAGE_CHILDREN)
        origin_s = whole.ru_utime + whole.ru_stime - after.ru_utime - after.ru_stime
    return {"fetch_wall_s": wall_s, "client_cpu_s": client_s, "origin_cpu_s": origin_s}


JOBS: dict[str, Job] = {
    "shardcast": shardcast,
    "tiny": swarm("tiny"),
    "quickstart": swarm("quickstart"),
}


def _shoal(tree: Path, *argv: str) -> None:
    done = subprocess.run(
        [*SHOAL, *argv],
        env=_environment(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"shoal {' '.join(argv)} of {tree} failed:\n{done.stdout[-2000:]}")


def _environment(tree: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(tree / "src")}


if __name__ == "__main__":
    main()
