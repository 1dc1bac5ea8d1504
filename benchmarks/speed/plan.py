"""Compare the estimates of `shoal check` with committed figures of runs: seconds per step, and memory.

    python -m benchmarks.speed.plan record tiny --steps 16          record one `shoal run` in results/plan.json
    python -m benchmarks.speed.plan record quickstart --steps 8
    python -m benchmarks.speed.plan                                 write the comparison to results/plan.json; run nothing

The committed runs are of tiny, quickstart and GSM8K, on two CPUs whose speed other benchmarks measured part by part
(`DEVICES`; sources: cli/preflight/estimate.py). Their seconds per step come from quiet machines. A run of `record` is
compared with the estimate for its own machine, whose peak is measured just before. For the runs in `ESTIMATED`, the estimate
that `shoal run` printed is compared with the whole run. tests/cli/preflight/test_measured.py computes the ratios again.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.machine import RESULTS, ROOT, describe, save
from shoal.cli.preflight.estimate import (
    BUNDLED,
    Speed,
    Work,
    measure,
    memory_of,
    processes,
    speed,
    step_seconds,
    together,
    work_of,
)
from shoal.config import Config, load
from shoal.model.dtype import pick

PATH = RESULTS / "plan.json"
BF16 = 2
KEPT = ("time_s", "completion/length_mean", "reward/zero_std_frac")
SETTLED = 2  # this many first steps are not counted, because workers, validator and evaluator start during them
PROMPT = {"quickstart": 26, "tiny": 6, "gsm8k": 120}  # tokens; gsm8k as in benchmarks/speed/trl
# Speed of both cores of each CPU. To decode a token, X takes 31 ms for the weights and 2.3 ms per completion, with two
# threads. E takes 26 ms and 1.6 ms, with one thread.
DEVICES = {
    "X": Speed(dense=0.40 * 1327e9, attention=0.045 * 1327e9, decode=0.089 * 1327e9, bandwidth_Bps=8.6e9),
    "E": Speed(dense=0.475 * 944e9, attention=0.05 * 944e9, decode=0.34 * 944e9, bandwidth_Bps=20.6e9),
}
RUNS = {  # runs of benchmarks/learning/runs.py: the config and the CPU
    "tiny-exact": ("tiny", "X"),
    "quickstart-exact": ("quickstart", "X"),
    "quickstart-fast": ("quickstart", "X"),
}
# `shoal run` on GSM8K, set up as workload b of benchmarks/speed/trl at commit 775f024: 64 completions of about 210 tokens.
COMPLETIONS = (
    "coordinator.online_filter=false",
    "coordinator.async_level=1",
    "workers.count=1",
    "workers.groups_per_submission=8",
    "learner.activation_checkpointing=false",
    "learner.row_tokens=1024",
    "tasks.length_targets=[128]",
)
# the settings of quickstart.toml when the runs of 16 steps were made
LONGER = (
    "run.steps=16",
    "sampling.max_tokens=16",
    "learner.row_tokens=2048",
    "learner.activation_checkpointing=true",
    "evaluator.n=256",
)
ESTIMATED = ("quickstart", "quickstart-float32")  # runs for which `shoal run` printed an estimate


@dataclass(frozen=True)
class Row:
    run: str
    what: str  # the figure's name, with its unit
    planned: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.planned / self.measured


def rows() -> Iterator[Row]:
    """Yield every comparison."""
    for name in ESTIMATED:
        yield from _of_estimated(name)
    for name, (config, device) in RUNS.items():
        runs = _json(name)["runs"]
        longer = LONGER if config == "quickstart" and runs[0]["steps"] == 16 else ()
        if "estimated_s" not in runs[0]:
            yield from _of_run(name, runs, load(ROOT / "configs" / f"{config}.toml", longer), DEVICES[device])
    yield _of_completions()
    for name, run in _json("plan")["runs"].items():
        yield from _of_recorded(name, run)


def planned_s(config: Config, work: Work, machine: Speed) -> float:
    """Return the estimated seconds of a step of `shoal run`."""
    return sum(step_seconds(BUNDLED[config.model.name], work, BF16, machine).values())


def _of_estimated(name: str) -> Iterator[Row]:
    """Compare whole runs with the estimate that `shoal run` made from the machine's measured speed before it started."""
    runs = [run for run in _json(name)["runs"] if "estimated_s" in run]
    for what, planned, measured in (
        ("run_s", "estimated_s", "wall_s"),
        ("memory_bytes", "estimated_bytes", "peak_together_bytes"),
    ):
        if runs:
            yield Row(name, what, *(statistics.fmean(run[key] for run in runs) for key in (planned, measured)))


def _of_run(name: str, runs: list[dict[str, Any]], config: Config, device: Speed) -> Iterator[Row]:
    length = round(statistics.fmean(_settled(runs, "completion/length_mean")))
    flat = statistics.fmean(_settled(runs, "reward/zero_std_frac"))
    work = work_of(config, prompt=PROMPT[RUNS[name][0]], length=length, useful=1 - flat)
    took_s = statistics.fmean(_step_s(run["metrics"]["time_s"]) for run in runs)
    yield Row(name, "step_s", planned_s(config, work, device), took_s)
    peaks = {process: statistics.fmean(run["peak_rss_bytes"][process] for run in runs) for process in _PROCESSES}
    yield from _memory(name, config, work, peaks, statistics.fmean(run["peak_together_bytes"] for run in runs))


def _settled(runs: list[dict[str, Any]], name: str) -> list[float]:
    return [value or 0.0 for run in runs for value in run["metrics"][name][SETTLED:]]


def _of_completions() -> Row:
    """Compare the run on GSM8K. Skip its first step, which waits for the first rollouts."""
    [run] = _json("trl-completions-run")["measurement b"]["runs"]
    config = load(ROOT / "configs" / "gsm8k.toml", COMPLETIONS)
    length = round(statistics.fmean(step["tokens"] / step["completions"] for step in run["steps"]))
    work = work_of(config, prompt=PROMPT["gsm8k"], length=length)
    took_s = statistics.fmean(step["seconds"] for step in run["steps"][1:])
    return Row("trl-completions-run", "step_s", planned_s(config, work, DEVICES["E"]), took_s)


def _of_recorded(name: str, run: dict[str, Any]) -> Iterator[Row]:
    config = load(ROOT / "configs" / f"{name}.toml", run["overrides"])
    length = round(statistics.fmean(step["completion/length_mean"] for step in run["steps"]))
    work = work_of(config, prompt=PROMPT[name], length=length)
    label, here = f"{name}, recorded", speed(**run["device"])
    took_s = _step_s([step["time_s"] for step in run["steps"]])
    flat = statistics.fmean(step["reward/zero_std_frac"] for step in run["steps"][SETTLED:])
    ran = work_of(config, prompt=PROMPT[name], length=length, useful=1 - flat)
    yield Row(label, "step_s", planned_s(config, ran, here), took_s)
    yield from _memory(label, config, work, run["peak_rss_bytes"], run["peak_together_bytes"])


_PROCESSES = {"learner": "learner", "worker-0": "worker", "validator": "validator", "origin": "origin"}


def _memory(name: str, config: Config, work: Work, peaks: dict[str, float], peak_bytes: float | None) -> Iterator[Row]:
    memory = memory_of(BUNDLED[config.model.name], work, BF16)
    if peak_bytes is not None:
        yield Row(name, "memory_bytes", together(memory, processes(config)), peak_bytes)
    for process, role in _PROCESSES.items():
        yield Row(name, f"{role}_bytes", memory[role], peaks[process])


def _step_s(ends_s: list[float]) -> float:
    return (ends_s[-1] - ends_s[SETTLED - 1]) / (len(ends_s) - SETTLED)


def _json(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def record(config: str, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Start a `shoal run` with a small evaluator. Return its figures."""

    machine, result = describe(), measure(pick("auto")[0])
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "run"
        argv = [sys.executable, "-m", "shoal", "run", str(ROOT / "configs" / f"{config}.toml"), "--out", str(out)]
        for setting in (f"run.steps={steps}", "evaluator.n=4", *overrides):
            argv += ["--set", setting]
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(argv)} failed:\n{done.stdout[-2000:]}")
        summary = json.loads((out / "summary.json").read_text())
        reports = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "command": f"python -m benchmarks.speed.plan record {config} --steps {steps}",
        "machine": machine,
        "device": {"flops": result["flops"], "bandwidth_Bps": result["bandwidth_Bps"], "cores": machine["cores"]},
        "overrides": [override for override in overrides if not override.startswith("tasks.sources")],
        "steps": [{name: report[name] for name in KEPT} for report in reports],
        "peak_rss_bytes": summary["peak_rss_bytes"],
        "peak_together_bytes": summary["peak_together_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    recording = commands.add_parser("record")
    recording.add_argument("config", help="name of a file in configs/, without .toml")
    recording.add_argument("--steps", type=int, default=8)
    recording.add_argument("--set", action="append", default=[], help="as for `shoal run`")
    arguments = parser.parse_args()
    known = _json("plan") if PATH.exists() else {"command": "python -m benchmarks.speed.plan", "runs": {}}
    if arguments.command:
        known["runs"][arguments.config] = record(arguments.config, arguments.steps, arguments.set)
        save(PATH, known)
        return
    result = list(rows())
    known["compared"] = [vars(row) | {"ratio": round(row.ratio, 3)} for row in result]
    save(PATH, known)
    for row in result:
        sys.stdout.write(f"{row.run:22} {row.what:16} {row.planned:12.4g} {row.measured:12.4g} {row.ratio:6.2f}\n")


if __name__ == "__main__":
    main()
