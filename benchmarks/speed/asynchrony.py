"""Measure whether asynchrony pays: the tiny run at async level 2 and at 0 (synchronous), in turns on the same machine.

    python -m benchmarks.speed.asynchrony [--pairs 3] [--config tiny]

Writes benchmarks/results/asynchrony.json. Time counts from the first trained step to the last, so loading is excluded. At
level 0 nothing overlaps. The comparison is fair, because `shoal run` then gives each phase all cores (cores.share_threads).
"""

import argparse
import statistics
import sys
from typing import Any

from benchmarks.common.machine import RESULTS, about, save
from benchmarks.learning.runs import one_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--config", default="tiny")
    arguments = parser.parse_args()
    result: dict[str, Any] = about() | {"runs": []}
    for pair in range(arguments.pairs):
        for level in (2, 0):
            run = one_run(arguments.config, pair, "", ["--set", f"coordinator.async_level={level}"])
            result["runs"].append({"async_level": level} | figures(run))
            sys.stdout.write(f"{result['runs'][-1]}\n")
            sys.stdout.flush()
    result["median"] = {level: medians(result["runs"], level) for level in (2, 0)}
    ratio = result["median"][2]["tokens_per_s"] / result["median"][0]["tokens_per_s"]
    result["tokens_per_s_ratio"] = round(ratio, 3)
    path = RESULTS / "asynchrony.json"
    save(path, result)
    sys.stdout.write(f"{result['median']} ratio {ratio:.2f}\n")


def figures(run: dict[str, Any]) -> dict[str, float]:
    """Return trained tokens per second and the share of time that the learner waits, from the first step to the last."""
    metrics = run["metrics"]
    seconds = metrics["time_s"][-1] - metrics["time_s"][0]
    waiting, busy, tokens = (sum(metrics[f"perf/{name}"][1:]) for name in ("waiting_s", "busy_s", "tokens"))
    return {
        "tokens_per_s": tokens / seconds,
        "learner_waiting_frac": waiting / (waiting + busy),
        "staleness_mean": statistics.mean(metrics["async/staleness_mean"][1:]),
        "seconds": seconds,
        "heldout_greedy_after": run["heldout_after"]["greedy"],
    }


def medians(runs: list[dict[str, float]], level: int) -> dict[str, float]:
    chosen = [run for run in runs if run["async_level"] == level]
    return {name: statistics.median(run[name] for run in chosen) for name in chosen[0] if name != "async_level"}


if __name__ == "__main__":
    main()
