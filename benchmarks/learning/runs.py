"""Run a config and record, for each run, accuracy before and after, verdicts, time and memory.

    python -m benchmarks.learning.runs quickstart --seeds 0 1 2
    python -m benchmarks.learning.runs tiny --cheats           one run per lie, with one worker that tells it
    python -m benchmarks.learning.runs functions --finished runs/functions-0    record finished runs; run nothing
    python -m benchmarks.learning.runs quickstart --plot    draw docs/images/quickstart.png from the results; run nothing

Writes benchmarks/results/<label>.json (machine, command, every summary, the curves) and prints a table. `--set KEY=VALUE` is
passed on to `shoal run`.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.machine import IMAGES, RESULTS, ROOT, about, save
from benchmarks.trust.adversary.cheats import CHEATS
from benchmarks.trust.byzantine import liars
from shoal.protocol.messages import Evaluation
from shoal.watch.plot import draw_curve

# Metrics that tables, pictures and other benchmarks read. A run's own metrics.jsonl has more.
KEPT = re.compile(
    r"time_s|(reward|score|length_penalty)/mean|reward/zero_std_frac|completion/length_mean|optim/grad_norm|"
    r"policy/(entropy|mismatch_kl)|async/staleness_mean|perf/(tokens|busy_s|waiting_s)|length/\d+/mean"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="name of a file in configs/, without .toml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--cheats",
        nargs="*",
        choices=list(CHEATS),
        help="one run for each of these lies; if none is named, for every lie",
    )
    parser.add_argument("--label", help="name of the results file (default: the config's name)")
    parser.add_argument("--finished", type=Path, nargs="+", default=[], help="record these folders of finished runs")
    parser.add_argument("--plot", action="store_true", help="draw the first run of the results; run nothing")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to `shoal run`")
    arguments, more = parser.parse_known_args()
    more += [word for setting in arguments.set for word in ("--set", setting)]
    if arguments.plot:
        plot(arguments.label or arguments.config)
        return
    kinds = [""] if arguments.cheats is None else arguments.cheats or list(CHEATS)
    result: dict[str, Any] = about() | {"runs": []}
    path = RESULTS / f"{arguments.label or arguments.config}.json"
    if arguments.finished:
        result["runs"] = [record(folder, cheat="") for folder in arguments.finished]
        save(path, result)
        sys.stdout.write(table(result["runs"]) + "\n")
        return
    for kind in kinds:
        for seed in arguments.seeds:
            result["runs"].append(one_run(arguments.config, seed, kind, more))
            save(path, result)
            sys.stdout.write(table(result["runs"][-1:]) + "\n")
            sys.stdout.flush()


def one_run(config: str, seed: int, cheat: str, more: list[str]) -> dict[str, Any]:
    """Start one `shoal run`, with a worker that lies if `cheat` names a lie. Return its record."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        argv = [sys.executable, "-m", "shoal", "run", str(ROOT / "configs" / f"{config}.toml")]
        argv += ["--set", f"run.seed={seed}", "--out", str(out), *more]
        run = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with liars(run, out, [cheat] if cheat else []):
            printed, _ = run.communicate()
        if run.returncode != 0:
            raise SystemExit(f"{' '.join(argv)} failed:\n{printed[-2000:]}")
        return record(out, cheat)


def record(folder: Path, cheat: str) -> dict[str, Any]:
    """Return a finished run's summary without the config, and one value per step of each metric in KEPT."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    summary["dtype"] = summary.pop("config")["model"]["dtype"]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = sorted({name for step in steps for name in step if KEPT.fullmatch(name)})
    metrics = {name: [step.get(name) for step in steps] for name in names}
    return {"cheat": cheat} | summary | {"metrics": metrics}


def plot(label: str) -> None:
    """Draw the curve of the results file's first run into docs/images/<label>.png."""
    run = json.loads((RESULTS / f"{label}.json").read_text())["runs"][0]
    evaluations = [
        Evaluation(version=0, final=False, **run["heldout_before"]),
        Evaluation(version=run["steps"], final=True, **run["heldout_after"]),
    ]
    metrics = [{"reward/mean": reward} for reward in run["metrics"]["reward/mean"]]
    draw_curve(metrics, evaluations, IMAGES / f"{label}.png", f"{label}-{run['seed']}")


def table(runs: list[dict[str, Any]]) -> str:
    """Return a Markdown row for each run."""
    return "\n".join(
        f"| {run['cheat'] or 'seed ' + str(run['seed'])} "
        f"| {run['heldout_before']['sampled']:.2f} → {run['heldout_after']['sampled']:.2f} "
        f"| {run['heldout_before']['greedy']:.2f} → {run['heldout_after']['greedy']:.2f} "
        f"| {run['wall_s']:.0f} | {run['peak_together_bytes'] / 2**30:.1f} "
        f"| {run['accepted']} | {run['rejected']} | {run['reject_reasons']} |"
        for run in runs
    )


if __name__ == "__main__":
    main()
