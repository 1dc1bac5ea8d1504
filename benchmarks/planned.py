"""What `shoal plan` says of the runs in results/plan.json, beside what was measured: arithmetic alone.

    python benchmarks/planned.py          prints the comparison

Planned with what the machine measured before the run, and with the run's own mean lengths. Called by `plan.py`, which
keeps the comparison with the results, and by tests/plan/test_measured.py.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from shoal.config import Config, load
from shoal.launch.cores import share_threads
from shoal.plan import BUNDLED, Links, Work, memory_of, plan, work_of
from shoal.plan.devices import Fleet, this_cpu

HERE = Path(__file__).parent
PATH = HERE / "results" / "plan.json"
SETTLED = 2  # steps before the first that counts: in them workers, validator and evaluator start
BF16 = 2  # bytes


def compared(name: str, run: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of one run: step_s, memory of its processes together and of each role, broadcast_s; planned and measured."""
    config = load(HERE.parent / "configs" / f"{name}.toml", run["overrides"])
    sizes, work = BUNDLED[config.model.name], work_of_run(config, run)
    device = this_cpu(run["flops"], run["bandwidth_Bps"], run["memory_bytes"])
    fleet, level = Fleet(device), config.coordinator.async_level
    found = plan(sizes, work, BF16, level, fleet, fleet, fleet, Links(), shares=shares(config, run["machine"]["cores"]))
    memory = memory_of(sizes, work, BF16)
    counts = {"coordinator": 1, "origin": 1, "relay": 1, "learner": 1, "evaluator": 1, "validator": 1}
    rows = {
        "step_s": (found.step_s, step_s(run)),
        "memory_bytes": (memory.together(counts | {"worker": config.workers.count}), run["peak_together_bytes"]),
        "broadcast_s": (found.seconds["broadcast"], broadcast_s(run)),
    }
    peaks = run["peak_rss_bytes"]
    for role, process in (("learner", "learner"), ("worker", "worker-0"), ("validator", "validator")):
        rows[f"{role}_bytes"] = (memory.roles[role], peaks[process])
    return {row: {"planned": p, "measured": m, "ratio": p / m} for row, (p, m) in rows.items()}


def work_of_run(config: Config, run: dict[str, Any]) -> Work:
    length = round(statistics.fmean(step["completion/length_mean"] for step in run["steps"][SETTLED:]))
    useful = config.coordinator.prompts_per_step * (len(run["steps"]) - SETTLED) / run["groups_judged"]
    return work_of(config, prompt=run["prompt_tokens"], length=length, useful=min(1.0, useful))


def shares(config: Config, cores: int) -> dict[str, float]:
    """Of the cores, as `shoal run` deals them out."""
    threads = share_threads(config, cores)
    processes = {
        "learner": threads["learner"],
        "rollouts": threads["worker"] * config.workers.count,
        "validation": threads["validator"] * config.validator.count,
    }
    return {role: count / cores for role, count in processes.items()}


def step_s(run: dict[str, Any]) -> float:
    """Mean, of the steps that count."""
    times = [step["time_s"] for step in run["steps"]]
    return float((times[-1] - times[SETTLED - 1]) / (len(times) - SETTLED))


def broadcast_s(run: dict[str, Any]) -> float:
    """Median over versions, from the step that wrote it until the last worker had verified it."""
    took = []
    for number, step in enumerate(run["steps"][SETTLED - 1 :], SETTLED):
        ends = [one["to_s"] for one in run["fetched"] if one["version"] == number and one["node"].startswith("worker")]
        if len(ends) == run["workers"]:
            took.append(max(ends) - step["time_s"])
    return statistics.median(took)


def main() -> None:
    for name, run in json.loads(PATH.read_text())["runs"].items():
        for row, found in compared(name, run).items():
            sys.stdout.write(
                f"{name:12} {row:16} {found['planned']:14.4g} {found['measured']:14.4g} {found['ratio']:6.2f}\n"
            )


if __name__ == "__main__":
    main()
