"""Which process of a whole `shoal run` holds how much memory, at the moment when all of them hold the most.

    python benchmarks/run_memory.py --label after [--steps 6] [--set learner.row_tokens=512]

The workload is the sums of `trl.py`, with its settings: a worker, proofs, validation, broadcast, ledger, evaluator. Figures
are Pss (pages mapped by several processes are shared out among them), sampled twice a second: anonymous memory, which is
tensors and Python objects, and file pages, which are libraries and weights being read. Loading and every kind of work occur
within a few steps; a checkpoint is written after the last one.
Writes benchmarks/results/run_memory.json: one entry for each label.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from against_trl.weigh import SAMPLE_S, family, memory
from machine import describe
from trl import ROOT, WORKLOADS

from shoal import config as config_module

PATH = Path(__file__).parent / "results" / "run_memory.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", nargs="+", default=[], help="fields of the config, which override the workload's")
    arguments = parser.parse_args()
    steps = [f"run.steps={arguments.steps}", f"learner.checkpoint_every={arguments.steps}", "evaluator.every=0"]
    asked = WORKLOADS["a"]
    more = [*asked.overrides, *steps, f"run.threads={arguments.threads}", "model.dtype=bfloat16", *arguments.set]
    config = config_module.load(ROOT / "configs" / f"{asked.config}.toml", more)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        quiet = config.evaluator.model_copy(update={"n": 1})  # as in trl.py
        (Path(folder) / "config.toml").write_text(config_module.dumps(config.model_copy(update={"evaluator": quiet})))
        argv = [sys.executable, "-m", "shoal", "run", f"{folder}/config.toml", "--out", str(out)]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": str(arguments.threads)}
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, env=environment) as process:
            found = watch(process)
        if process.returncode:
            sys.exit(f"shoal run failed with {process.returncode}")
        summary = json.loads((out / "summary.json").read_text())
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found |= {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe(),
        "wall_s": summary["wall_s"],
        "train_s": [step.get("perf/busy_s") for step in metrics],
    }
    result = json.loads(PATH.read_text()) if PATH.exists() else {}
    PATH.write_text(json.dumps(result | {arguments.label: found}, indent=1) + "\n")
    for name, of in sorted(found["at_peak"].items(), key=lambda item: -item[1]["Pss"]):
        own = found["own_peak"][name]
        sys.stdout.write(f"{name:14} {of['Pss'] / 2**20:7.0f} MiB, at its own peak {own['Pss'] / 2**20:7.0f}\n")
    sys.stdout.write(f"together {found['peak_bytes'] / 2**30:.2f} GiB, {found['peak_s']:.0f} s after the start\n")


def watch(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Sample until the process ends. Returns the peak, and every process's share at that moment and at its own peak."""
    began_s = time.monotonic()
    found: dict[str, Any] = {"peak_bytes": 0, "peak_s": 0.0, "at_peak": {}, "own_peak": {}}
    while process.poll() is None:
        time.sleep(SAMPLE_S)
        held = {name_of(pid): memory(pid) for pid in family(process.pid)}
        for name, of in held.items():
            if of["Pss"] > found["own_peak"].get(name, of | {"Pss": 0})["Pss"]:
                found["own_peak"][name] = of
        together = sum(of["Pss"] for of in held.values())
        if together > found["peak_bytes"]:
            found |= {"peak_bytes": together, "peak_s": time.monotonic() - began_s, "at_peak": held}
    return found


def name_of(pid: int) -> str:
    """The role of a process of the run: its title, or its number."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
    except OSError:  # it has just ended
        return str(pid)
    if words[:1] == ["shoal"]:
        folder = words[words.index("--dir") + 1] if "--dir" in words else words[1]
        return Path(folder).name
    return next(
        (name for name in ("forkserver", "resource_tracker", "store.reader") if any(name in word for word in words)),
        str(pid),
    )


if __name__ == "__main__":
    main()
