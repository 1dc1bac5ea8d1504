"""`shoal plan` against runs: what its constants are measured by, and short runs whose figures it is compared with.

    python benchmarks/plan.py parts
    python benchmarks/plan.py run tiny --steps 16
    python benchmarks/plan.py run gsm8k --steps 5 --set tasks.sources.0.hub= --set tasks.sources.0.path=DIR
    python benchmarks/plan.py compare

    parts     CPU seconds of one thread for an update, a prefill and decoding of SmolLM2, at short and long completions
    run       one `shoal run`: seconds a step, CPU seconds of each process a step, memory, and when nodes had each version
    compare   prints what tests/plan/test_measured.py checks; runs nothing

CPU seconds are less disturbed by other work on the machine than seconds are; `others` says how many cores that took.
A broadcast is timed from the report of the step that wrote the version until the last worker has verified it.
Writes benchmarks/results/plan.json; each command replaces its own part.
"""

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from exact_speed import made
from machine import describe

from shoal.config.recipe import LearnerSection, LossSection
from shoal.engine.protocol import Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.learner.batch import micro_batches
from shoal.learner.groups import Group
from shoal.learner.policy import Policy
from shoal.model.load import load_model
from shoal.model.sources import SMOLLM2, resolve
from shoal.model.tree import Tree, forward_hidden, pack
from shoal.plan import measure
from shoal.validator.distribution import token_evidence
from shoal.validator.prefill import VOCABULARY_ROWS

HERE = Path(__file__).parent
PATH = HERE / "results" / "plan.json"
SHAPES = {"short": (8, 8, 40, 16), "long": (2, 8, 100, 200)}  # groups, completions, tokens of prompt and completion
DECODED = {"8 x 24": (1, 8, 40, 24), "32 x 24": (4, 8, 40, 24), "32 x 200": (4, 8, 40, 200)}
VOCABULARY = 49152
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    parts_parser = commands.add_parser("parts")
    parts_parser.add_argument("--rounds", type=int, default=2)
    run_parser = commands.add_parser("run")
    run_parser.add_argument("config", help="name of a file in configs/, without .toml")
    run_parser.add_argument("--steps", type=int, default=8)
    run_parser.add_argument("--set", action="append", default=[], help="as for `shoal run`")
    commands.add_parser("compare")
    arguments = parser.parse_args()
    if arguments.command == "compare":
        compare()
        return
    found = parts(arguments.rounds) if arguments.command == "parts" else run(arguments)
    known = json.loads(PATH.read_text()) if PATH.exists() else {"runs": {}}
    said = {"command": "python benchmarks/plan.py " + " ".join(hidden(word) for word in sys.argv[1:])}
    said |= {"machine": describe() | {"load": os.getloadavg()}}
    if arguments.command == "parts":
        known["parts"] = said | found
    else:
        known["runs"][arguments.config] = said | found
    PATH.write_text(json.dumps(known, indent=1) + "\n")


def hidden(word: str) -> str:
    """A folder of data is nobody's business."""
    return word.rpartition("=")[0] + "=DIR" if "=/" in word else word


# --- parts -------------------------------------------------------------------------------------------------------------


def parts(rounds: int) -> dict[str, Any]:
    device = measure()
    torch.set_num_threads(1)
    folder = resolve(SMOLLM2)
    cpu_s: dict[str, list[float]] = {}
    for kind in (decoding, prefilling, updating):
        for name, part in kind(folder).items():
            part()  # warms up
            cpu_s[name] = []
            for _ in range(rounds):
                started_s = time.process_time()
                part()
                cpu_s[name].append(time.process_time() - started_s)
            sys.stdout.write(f"{name}: {[round(each, 2) for each in cpu_s[name]]} CPU s\n")
            sys.stdout.flush()
    return {"flops": device.flops, "bandwidth_Bps": device.bandwidth_Bps, "cpu_s": cpu_s}


def decoding(folder: Path) -> dict[str, Callable[[], object]]:
    engine = TorchEngine("bfloat16", "cpu", "exact")
    engine.load(folder)
    found: dict[str, Callable[[], object]] = {}
    for name, shape in DECODED.items():
        trees = made(VOCABULARY, *shape)
        seeds = [[100 * g + i for i in range(shape[1])] for g in range(len(trees))]
        prompts, sampling = [tree.prompt for tree in trees], Sampling(1.0, shape[3], ())
        found[f"decode {name}"] = partial(engine.generate, prompts, seeds, sampling)
    return found


def prefilling(folder: Path) -> dict[str, Callable[[], object]]:
    model = load_model(folder, "bfloat16", numerics="exact")
    return {f"prefill {name}": partial(prefill, model, made(VOCABULARY, *shape)) for name, shape in SHAPES.items()}


def updating(folder: Path) -> dict[str, Callable[[], object]]:
    policy = new_policy(folder)
    return {f"update {name}": partial(update, policy, made(VOCABULARY, *shape)) for name, shape in SHAPES.items()}


def prefill(model: Any, trees: list[Tree]) -> None:
    """As the validator does it."""
    with torch.inference_mode():
        packed = pack(trees)
        hidden_NH = forward_hidden(model, packed)
        for start in range(0, len(hidden_NH), VOCABULARY_ROWS):
            logits_CV = model.lm_head(hidden_NH[start : start + VOCABULARY_ROWS])
            for row in range(0, len(logits_CV), 16):
                at = start + row
                token_evidence(logits_CV[row : row + 16].float(), packed.target_N[at : at + 16])


def new_policy(folder: Path) -> Policy:
    """As the learner of configs/gsm8k.toml."""
    loss = LossSection(beta=0.0, entropy=0.0)
    section = LearnerSection(lr=1e-6, warmup_steps=0, row_tokens=4096, activation_checkpointing=True, loss=loss)
    return Policy(folder, section, "bfloat16", "cpu", 1.0, numerics="exact")


def update(policy: Policy, trees: list[Tree]) -> None:
    groups = [
        Group(
            f"s{n}",
            0,
            list(tree.prompt),
            [list(c) for c in tree.completions],
            [[-5.0] * len(c) for c in tree.completions],
            [float(i % 2) for i in range(len(tree.completions))],
        )
        for n, tree in enumerate(trees)
    ]
    rows = micro_batches(groups, row_tokens=policy.config.row_tokens, normalize_std=False)
    policy.update(rows, sum(group.n_tokens for group in groups))


# --- whole runs --------------------------------------------------------------------------------------------------------


class Clerk(threading.Thread):
    """Notes the CPU seconds of every process of a run, and of the machine, twice a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.notes: list[tuple[float, float, dict[str, float]]] = []  # time, of the machine, of each process
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.5):
            self.notes.append((time.time(), machine_cpu_s(), processes_cpu_s()))

    def between(self, start_s: float, end_s: float) -> tuple[float, dict[str, float]]:
        """CPU seconds of the machine and of each process."""
        first = min(self.notes, key=lambda note: abs(note[0] - start_s))
        last = min(self.notes, key=lambda note: abs(note[0] - end_s))
        return last[1] - first[1], {name: last[2][name] - first[2].get(name, 0.0) for name in last[2]}


def machine_cpu_s() -> float:
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / TICKS


def processes_cpu_s() -> dict[str, float]:
    """By the name of its folder: the children of `shoal run` carry their command as title."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().rstrip("\0").replace("\0", " ").split()
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if words[:1] == ["shoal"] and "--dir" in words and RUNS in " ".join(words):
            found[Path(words[words.index("--dir") + 1]).name] = (int(fields[11]) + int(fields[12])) / TICKS
    return found


RUNS = "shoal-plan-"  # in the path of this run's folder


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    device = measure()
    with tempfile.TemporaryDirectory(prefix=RUNS) as name:
        out = Path(name) / "run"
        argv = [sys.executable, "-m", "shoal", "run", str(HERE.parent / "configs" / f"{arguments.config}.toml")]
        settings = [f"run.steps={arguments.steps}", "evaluator.n=4", *arguments.set]
        argv += ["--out", str(out), *(word for setting in settings for word in ("--set", setting))]
        clerk = Clerk()
        clerk.start()
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        clerk.ended.set()
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(argv)} failed:\n{done.stdout[-2000:]}")
        return {"flops": device.flops, "bandwidth_Bps": device.bandwidth_Bps} | recorded(out, clerk)


def recorded(out: Path, clerk: Clerk) -> dict[str, Any]:
    """From the second step to the last: what was steady."""
    summary = json.loads((out / "summary.json").read_text())
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    ends_s = [step["time_s"] for step in steps]
    machine_s, cpu_s = clerk.between(ends_s[1], ends_s[-1])
    span_s = ends_s[-1] - ends_s[1]
    with sqlite3.connect(f"file:{out / 'coordinator' / 'pool.sqlite'}?mode=ro", uri=True) as db:
        fetched = db.execute(
            "SELECT name, transfers.version, from_s, to_s, size_bytes FROM transfers JOIN nodes ON key = node"
        ).fetchall()
        published = dict(db.execute("SELECT version, published_s FROM policies"))
        groups = db.execute(
            "SELECT sum(groups) FROM submissions WHERE judged_s BETWEEN ? AND ?", (ends_s[1], ends_s[-1])
        )
        generated = groups.fetchone()[0]
    names = ("perf/tokens", "completion/length_mean", "perf/busy_s", "perf/waiting_s", "sync/seconds")
    return {
        "steps": [{name: step[name] for name in ("time_s", *names)} for step in steps],
        "groups_judged": generated,
        "span_s": span_s,
        "cpu_s": cpu_s,
        "others": (machine_s - sum(cpu_s.values())) / span_s,
        "version_bytes": steps[-1]["sync/bytes"],
        "published_s": published,
        "fetched": [
            dict(zip(("node", "version", "from_s", "to_s", "size_bytes"), row, strict=True)) for row in fetched
        ],
        "peak_rss_bytes": summary["peak_rss_bytes"],
        "peak_together_bytes": summary["peak_together_bytes"],
        "tokens_generated": summary["tokens_generated"],
        "settings": {name: summary["config"][name] for name in ("sampling", "coordinator", "workers")},
    }


def compare() -> None:
    raise SystemExit("not yet")


if __name__ == "__main__":
    main()
