"""Compare Shoal with TRL's GRPOTrainer: the same model, tasks, prompts, batch and recipe, in turns on one machine.

    python -m venv PEER && PEER/bin/pip install torch==2.13.0
    PEER/bin/pip install trl==1.16.0 peft==0.19.1 blake3 pydantic tomli_w
    python -m benchmarks.speed.trl --peer PEER [--workload a] [--rounds 3] [--smoke]
    python -m benchmarks.speed.trl --peer PEER --tune [--workload b] [--only "bf16 x8" "bf16 x16"]

    a   prompt-heavy: small sums, prompts of 46 tokens, completions of at most 16
    b   completion-heavy: GSM8K, prompts of about 120 tokens, completions of at most 256
    c   an adapter: configs/words.toml, which says where model and problems come from (`--set model.name=FOLDER`)
    d   an adapter and longer answers: configs/recipe.toml, on GSM8K

A step has eight prompts with eight completions each, and one optimizer step; in c and d, 16 completions each and eight
optimizer steps. There, the loss has no KL and entropy terms, because TRL has no entropy bonus. Three systems take turns in
each round:

    shoal run    the whole system: a worker, proofs, validation, training, SHARDCAST, the ledger
    shoal loop   generation and training in one process, without verification (loop.py); in a and b
    trl          GRPOTrainer with the settings CHOSEN in settings.py, which also lists the settings that --tune tries

All systems generate the same number of completions, because `shoal run` also takes groups of equal rewards instead of
sampling again (`coordinator.online_filter = false`). None saves checkpoints or recomputes activations. Held-out accuracy
(not in b) is measured after the run, by one engine and one grader, on bf16 weights that each system wrote every few
steps. Writing them is not timed. Seconds to an accuracy count from the launch of the first process. Memory is the peak of
all processes of a system together (Pss). A step of TRL ends with its optimizer step, and one of `shoal run` with the
published version. The last steps of `shoal run` do not count, because nothing is generated during them.

Writes benchmarks/results/trl.json after every run: commands, machine, versions, every step, every setting tried.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.machine import RESULTS, ROOT, about, save
from benchmarks.speed.trl.heldout import first_at, measure
from benchmarks.speed.trl.job import write_job
from benchmarks.speed.trl.settings import CHOSEN, SETTINGS
from benchmarks.speed.trl.weigh import Scales
from shoal import config as config_module
from shoal.model import dtype
from shoal.model.sources import resolve

HERE = Path(__file__).parent
CALCULATOR = (
    "You are a calculator. You answer every sum with its result, a number, and write no words, no units and no working."
)
ALIKE = (
    "coordinator.online_filter=false",
    "coordinator.async_level=1",
    "workers.count=1",
    "learner.activation_checkpointing=false",
)


@dataclass(frozen=True)
class Workload:
    config: str
    overrides: tuple[str, ...]
    smoke: tuple[str, ...]
    steps: int
    accuracy: bool  # is held-out accuracy measured?


ADAPTER = (*ALIKE, "learner.loss.beta=0", "learner.loss.entropy=0", "evaluator.n=256")
ADAPTER_SMOKE = ("evaluator.n=8", "sampling.max_tokens=8", "sampling.group_size=4")
WORKLOADS = {
    "a": Workload(
        "quickstart",
        (*ALIKE, "sampling.max_tokens=16", "learner.lr=4e-5", "evaluator.n=256", f"tasks.system={CALCULATOR}"),
        ("evaluator.n=32", "coordinator.prompts_per_step=4", "workers.groups_per_submission=2"),
        16,
        True,
    ),
    "b": Workload(
        "gsm8k",
        (*ALIKE, "learner.row_tokens=2560", "tasks.length_targets=[128]"),
        ("sampling.max_tokens=48", "coordinator.prompts_per_step=4", "workers.groups_per_submission=2"),
        8,
        False,
    ),
    "c": Workload("words", ADAPTER, ADAPTER_SMOKE, 16, True),
    "d": Workload("recipe", ADAPTER, ADAPTER_SMOKE, 16, True),
}
SYSTEMS = ("trl", "shoal loop", "shoal run")


def main() -> None:
    arguments = read_arguments()
    torch.set_num_threads(arguments.threads)
    path = RESULTS / f"{arguments.label or ('trl-smoke' if arguments.smoke else 'trl')}.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    part: dict[str, Any] = {
        **about(),
        "peer": versions(arguments.peer),
        "runs": [],
    }
    result[f"{'settings' if arguments.tune else 'measurement'} {arguments.workload}"] = part
    for system, settings, seed in turns(arguments):
        with tempfile.TemporaryDirectory() as folder:
            run = one_run(arguments, system, settings, seed, Path(folder))
        run = {"workload": arguments.workload, "system": system, "settings": settings, "seed": seed} | run
        part["runs"].append(run)
        part["median"] = medians(part["runs"])
        save(path, result)
        sys.stdout.write(row(run) + "\n")
        sys.stdout.flush()


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="Python environment with TRL")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="a")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        help="steps of each run, or of the runs of each of --systems (default: 16, in b 8; 3 with --tune or --smoke)",
    )
    parser.add_argument("--every", type=int, default=2, help="steps between two measurements of held-out accuracy")
    parser.add_argument(
        "--target", type=float, nargs=2, default=(0.85, 0.6), help="held-out accuracy, greedy and sampled"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of each system together")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="Shoal's dtype")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of GSM8K's files")
    parser.add_argument("--limit-s", type=float, default=3600, help="limit of one run; a longer run counts as failed")
    parser.add_argument("--tune", action="store_true", help="try TRL's settings instead of measuring")
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), help="only these of TRL's settings")
    parser.add_argument("--set", nargs="+", default=[], help="fields of Shoal's config, which override the workload's")
    parser.add_argument("--smoke", action="store_true", help="one short round, to test the script")
    parser.add_argument("--label", help="name of the results file")
    arguments = parser.parse_args()
    arguments.dtype, _ = dtype.pick(arguments.dtype)
    if arguments.smoke:
        arguments.rounds = 1
    if arguments.workload in "cd" and "shoal loop" in arguments.systems and not arguments.tune:
        parser.error(f"workload {arguments.workload} has no `shoal loop`: add --systems trl 'shoal run'")
    return arguments


def turns(arguments: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Return the system, TRL settings and seed of every run, in order."""
    if arguments.tune:
        return [("trl", name, 0) for name in arguments.only or SETTINGS]
    return [
        (system, settings, seed)
        for seed in range(arguments.rounds)
        for system in arguments.systems
        for settings in (arguments.only or CHOSEN if system == "trl" else ("",))
    ]


def one_run(arguments: argparse.Namespace, system: str, settings: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run one system. Return its steps, memory and accuracy. `failed` is the reason if it failed."""
    chosen = WORKLOADS[arguments.workload]
    steps = 3 if arguments.smoke or arguments.tune else chosen.steps
    if arguments.steps:
        steps = arguments.steps[min(arguments.systems.index(system), len(arguments.steps) - 1)]
    more = [*chosen.overrides, *(chosen.smoke if arguments.smoke else ())]
    if chosen.config == "gsm8k":
        more.append(f"tasks.sources=[{{path = '{arguments.data.resolve()}/gsm8k_train.jsonl', reward = 'number'}}]")
    more += arguments.set
    # The run's own evaluator gets a single task. Accuracy of all versions is measured after the run.
    more += [f"run.steps={steps}", f"run.seed={seed}", "evaluator.every=0"]
    more += [
        f"model.dtype={arguments.dtype}",
        f"learner.keep_versions={steps + 1}",
        f"learner.checkpoint_every={steps}",
    ]
    config = config_module.load(ROOT / "configs" / f"{chosen.config}.toml", more)
    model, keeps = resolve(config.model.name), chosen.accuracy and not arguments.tune
    if system == "shoal run":
        versions_in = folder / "run" / "learner" / "versions"
        quiet = config.evaluator.model_copy(update={"n": 1})
        (folder / "config.toml").write_text(config_module.dumps(config.model_copy(update={"evaluator": quiet})))
        cores = ["taskset", "--cpu-list", f"0-{arguments.threads - 1}"]
        argv = [*cores, sys.executable, "-m", "shoal", "run", str(folder / "config.toml"), "--out", str(folder / "run")]
        launched_s = time.time()
    else:
        versions_in = folder / "versions"
        options = {"threads": arguments.threads, "dtype": arguments.dtype, "save_every": arguments.every}
        options["device"] = config.model.device
        options["settings"] = SETTINGS.get(settings)
        launched_s = write_job(folder, config, model, versions_in if keeps else None, **options)
        python = arguments.peer / "bin" / "python" if system == "trl" else sys.executable
        script = HERE / ("peer.py" if system == "trl" else "loop.py")
        argv = [str(python), str(script), str(folder / "job.json")]
    peak_bytes, failed = execute(argv, arguments, folder / "log")
    if failed:
        return {"failed": failed}
    ran = (
        read_run(folder / "run", launched_s) if system == "shoal run" else json.loads((folder / "out.json").read_text())
    )
    ran |= {"peak_bytes": peak_bytes, "median_step_s": statistics.median(step["seconds"] for step in counted(ran))}
    if keeps:
        ran["heldout"] = measure(config, arguments.dtype, model, versions_in, ran["steps"], arguments.every)
        ran["heldout_n"] = config.evaluator.n
        targets = dict(zip(("greedy", "sampled"), arguments.target, strict=True))
        ran |= {"targets": targets, "seconds_to_target": first_at(ran["heldout"], targets)}
    return ran


def execute(argv: list[str], arguments: argparse.Namespace, log: Path) -> tuple[int, str]:
    """Run a command to its end. Return the peak bytes of all its processes, and why it failed ("" if it did not)."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(arguments.threads),
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
    }
    with (
        log.open("wb") as out,
        subprocess.Popen(argv, stdout=out, stderr=out, env=environment) as process,
        Scales(process.pid) as scales,
    ):
        try:
            code = process.wait(arguments.limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # `shoal run` ends its children
            process.wait()
            return scales.together_bytes, f"not done after {arguments.limit_s:.0f} s"
    words = log.read_text(errors="replace").strip().splitlines()
    return scales.together_bytes, "" if code == 0 else "\n".join(words[-3:])[-600:]


def read_run(out: Path, launched_s: float) -> dict[str, Any]:
    """Return the steps of a `shoal run` in the other systems' format. A step lasts from the previous report to its own."""
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    completions = summary["config"]["coordinator"]["prompts_per_step"] * summary["config"]["sampling"]["group_size"]
    level = summary["config"]["coordinator"][
        "async_level"
    ]  # the rollouts of the last steps were made during earlier ones
    starts = [launched_s, *(step["time_s"] for step in metrics)]
    names = {
        "train_s": "perf/busy_s",
        "waited_s": "perf/waiting_s",
        "tokens": "perf/tokens",
        "reward_mean": "reward/mean",
    }
    steps = [
        {
            "step": number,
            "seconds": step["time_s"] - start,
            "since_launch_s": step["time_s"] - launched_s,
            "completions": completions,
            "counted": number > 1 and (number <= len(metrics) - level or len(metrics) <= level + 1),
            **{name: step.get(source) for name, source in names.items()},
        }
        for number, (start, step) in enumerate(zip(starts, metrics, strict=False), start=1)
    ]
    kept = ("wall_s", "accepted", "rejected", "reject_reasons", "tokens_generated", "tokens_trained", "peak_rss_bytes")
    return {"dtype": summary["config"]["model"]["dtype"], "steps": steps} | {name: summary[name] for name in kept}


def versions(peer: Path) -> dict[str, str]:
    names = ["torch", "trl", "transformers", "accelerate", "peft"]
    program = (
        f"import json; from importlib.metadata import version as v; print(json.dumps({{n: v(n) for n in {names}}}))"
    )
    done = subprocess.run([peer / "bin" / "python", "-c", program], capture_output=True, text=True, check=True)
    figures: dict[str, str] = json.loads(done.stdout)
    return figures


def counted(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the steps whose times count. The first does not, nor do those during which `shoal run` generates nothing."""
    return [step for step in run["steps"] if step.get("counted", step["step"] > 1)]


def medians(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return medians over all rounds of each system: seconds and tokens of the steps that count, and memory."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if "failed" not in run:
            groups.setdefault(" ".join(filter(None, (run["workload"], run["system"], run["settings"]))), []).append(run)
    return {
        name: {
            "step_s": statistics.median(step["seconds"] for run in group for step in counted(run)),
            "step_tokens": statistics.median(step["tokens"] for run in group for step in counted(run)),
            "peak_bytes": statistics.median(run["peak_bytes"] for run in group),
        }
        for name, group in groups.items()
    }


def row(run: dict[str, Any]) -> str:
    """Return a Markdown row."""
    head = f"| {run['workload']} | {run['system']} {run['settings']} | "
    if "failed" in run:
        return head + "failed: " + " ".join(run["failed"].split())[-300:] + " |"
    tokens = statistics.median(step["tokens"] for step in counted(run))
    curve = run.get("heldout", [])
    change = f"{curve[0]['greedy']:.2f} → {curve[-1]['greedy']:.2f}" if curve else ""
    return (
        f"{head}{run['median_step_s']:.1f} s | {tokens:.0f} tokens | {run['peak_bytes'] / 2**30:.2f} GiB | {change} |"
    )


if __name__ == "__main__":
    main()
