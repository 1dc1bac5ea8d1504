"""Does it pay to compute gradients while a batch fills? `learner.stream` on and off, in turns on the same machine.

    python benchmarks/streaming.py [--config tiny] [--rounds 3] [--row-tokens 512] [--groups 4] [--levels 1] [--reward 0.6]

With `stream`, rows of `--row-tokens` are computed as they fill, of submissions of `--groups`; without it, both are as the
config says. `--levels`: async levels to compare, each with and without. All runs of a round have the same seed. Seconds
count from the first trained step to the last, so that loading does not. `reward_s`: until the mean reward of all accepted
groups, over three steps, reaches `--reward`. `cpu_frac`: CPU time of the whole run, with start and evaluations, over wall
time and cores: what is left of 1 is all that streaming can win.
Writes benchmarks/results/streaming-CONFIG.json, or -LABEL. Unknown arguments are passed on to `shoal run`.
"""

import argparse
import json
import os
import statistics
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from cpu_time import cpu_s
from machine import describe
from runs import one_run

HERE = Path(__file__).parent
MEDIANS = (
    *("step_s", "reward_s", "cpu_frac", "waiting_frac", "early_frac", "staleness_mean", "reward_last"),
    *("seconds", "cpu_s", "peak_together_bytes"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--levels", type=int, nargs="+", default=[1])
    parser.add_argument("--reward", type=float, default=0.6)
    parser.add_argument("--label", help="name of the results file, in place of the config's")
    arguments, more = parser.parse_known_args()
    streams = [f"learner.row_tokens={arguments.row_tokens}", f"workers.groups_per_submission={arguments.groups}"]
    result: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "machine": describe(), "runs": []}
    path = HERE / "results" / f"streaming-{arguments.label or arguments.config}.json"
    variants = [(level, stream) for level in arguments.levels for stream in (False, True)]
    for seed in range(arguments.rounds):
        for level, stream in variants if seed % 2 == 0 else reversed(variants):
            fields = [f"coordinator.async_level={level}", *(["learner.stream=true", *streams] if stream else [])]
            with Meter() as meter:
                run = one_run(arguments.config, seed, "", [*more, *(part for one in fields for part in ("--set", one))])
            name = f"level {level}, {'streamed' if stream else 'at once'}"
            found = {"name": name, "cpu_s": meter.cpu_s, "load_after": os.getloadavg()[0]}
            found["cpu_frac"] = meter.cpu_s / run["wall_s"] / len(os.sched_getaffinity(0))
            result["runs"].append(found | figures(run, arguments.reward))
            sys.stdout.write(f"{result['runs'][-1]}\n")
            sys.stdout.flush()
            result["median"] = medians(result["runs"])
            path.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.writelines(f"{name}: {found}\n" for name, found in result["median"].items())


class Meter(threading.Thread):
    """The CPU seconds of all processes that this one starts, at most: read twice a second, because they end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.cpu_s = 0.0
        self._before_s = cpu_s(os.getpid())
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.5):
            with suppress(OSError):  # one of them has just ended
                self.cpu_s = max(self.cpu_s, cpu_s(os.getpid()) - self._before_s)

    def __enter__(self) -> "Meter":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join()


def figures(run: dict[str, Any], target: float) -> dict[str, Any]:
    first, *rest = run["metrics"]
    rewards = [step.get("reward/mean", 0.0) for step in run["metrics"]]
    at = next((n for n in range(2, len(rewards)) if statistics.mean(rewards[n - 2 : n + 1]) >= target), None)
    seconds = rest[-1]["time_s"] - first["time_s"]
    return {
        "seed": run["seed"],
        "seconds": seconds,
        "step_s": statistics.median(b["time_s"] - a["time_s"] for a, b in zip(run["metrics"], rest, strict=False)),
        "reward_s": None if at is None else run["metrics"][at]["time_s"] - first["time_s"],
        "reward_last": statistics.mean(rewards[-3:]),
        "waiting_frac": sum(step["perf/waiting_s"] for step in rest) / seconds,
        "early_frac": statistics.mean(step["perf/early_frac"] for step in rest),
        "staleness_mean": statistics.mean(step["async/staleness_mean"] for step in rest),
        "heldout_after": run["heldout_after"],
        "wall_s": run["wall_s"],
        "peak_together_bytes": run["peak_together_bytes"],
        "step_seconds": [b["time_s"] - a["time_s"] for a, b in zip(run["metrics"], rest, strict=False)],
    }


def medians(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By variant; of runs that reached the reward, how fast."""
    found: dict[str, dict[str, float]] = {}
    for run in runs:
        alike = [other for other in runs if other["name"] == run["name"]]
        values = {name: [one[name] for one in alike if one[name] is not None] for name in MEDIANS}
        found[run["name"]] = {name: statistics.median(of) for name, of in values.items() if of}
    return found


if __name__ == "__main__":
    main()
