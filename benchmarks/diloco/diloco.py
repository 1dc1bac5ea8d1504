"""Compare DiLoCo with data-parallel training on equally many tokens, for a small llama on real text, in one process.

    python -m benchmarks.diloco.diloco --seeds 0 1 2        run the settings missing from benchmarks/results/diloco.json
    python -m benchmarks.diloco.diloco --table              print that file as a table

Each step trains on the same `SEQUENCES` sequences in every setting. Data-parallel training computes one gradient over all of
them. With n sites, each site makes an AdamW step on 1/n of them. As in the paper, a model is first trained data-parallel
for a while. All sites start with its weights and moments, and so does data-parallel training.

The sites are simulated: they train in turn in this process. Their offers, averages and outer steps are made by the package's
own code, and the byte counts are the sizes of the files that it sends. A ring all-reduce of float32 gradients sends
2·(n−1)/n·4 bytes per parameter and step. Several processes may add to one file.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from benchmarks.common.machine import RESULTS, command_line, commit, save
from benchmarks.diloco.diloco_model import Size, Trainee, Trainees, perplexity, processor, tokens
from shoal.diloco.agreed import Agreed, Shapes
from shoal.diloco.codec import Kind
from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import Figures, Greeting, Terms
from shoal.diloco.site import Site

RESULT = RESULTS / "diloco.json"
SEQUENCES, BEFORE, STEPS = 8, 500, 1_500  # sequences in a step, steps before DiLoCo begins, and steps after that
SIZE = Size(
    steps=BEFORE + STEPS,
    lr=1e-3,
    width=192,
    layers=4,
    vocabulary=1_024,
    sequences=1,
    length=64,
    heldout=256,
    text_bytes=8_000_000,
    autocast=True,
)


@dataclass(frozen=True)
class Setting:
    sites: int
    inner_steps: int  # 0: data-parallel
    kind: Kind = "fp16"


GRID = [
    Setting(1, 0),
    *(Setting(4, 50, kind) for kind in ("fp32", "fp16", "int8", "int4")),
    *(Setting(sites, 50) for sites in (8, 2, 1)),
    *(Setting(sites, steps) for steps in (500, 100) for sites in (4, 8, 2, 1)),
]
EARLIER = {"fragments": 1, "delay": 0, "keep": 0.0}  # only runs of an earlier commit recorded these settings


def start(train_N: Tensor, seed: int) -> Trainee:
    """Return the model from which every setting starts. It was trained for `BEFORE` data-parallel steps."""
    trainee = Trainee(train_N, seed, list(range(SEQUENCES)), SIZE)
    for step in range(BEFORE):
        trainee.step(step)
    return trainee


def dense(first: Trainee, held_N: Tensor) -> dict[str, Any]:
    trainees = Trainees(first, 1)
    for step in range(BEFORE, SIZE.steps):
        trainees.step(step)
    return {"perplexity": perplexity_of(trainees.tensors[0], first, held_N)}


def perplexity_of(tensors: dict[str, Tensor], first: Trainee, held_N: Tensor) -> float:
    network = deepcopy(first.model)
    network.load_state_dict(tensors, strict=False)  # of tied weights, only one name is in `tensors`
    return perplexity(network, held_N, SIZE)


def sparse(setting: Setting, first: Trainee, held_N: Tensor) -> dict[str, Any]:
    trainees = Trainees(first, setting.sites)
    rounds = STEPS // setting.inner_steps
    terms = Terms(Shapes.of(first.tensors), rounds, kind=setting.kind, sites=setting.sites, wait_s=1e9)
    sent = received = 0
    with tempfile.TemporaryDirectory() as folder:
        agreed = Agreed.of(first.tensors, terms.shapes)
        meeting = Meeting(Path(folder), terms, {}, "benchmark", lambda: agreed)
        names = [f"site-{number}" for number in range(setting.sites)]
        sites = [Site(name, terms, Agreed.of(first.tensors, terms.shapes)) for name in names]
        for name in names:
            meeting.join(name, Greeting(about={}, placed=True))
        for step in range(1, STEPS + 1):
            trainees.step(BEFORE + step - 1)
            if step % setting.inner_steps == 0:
                offers = [site.offer(tensors) for site, tensors in zip(sites, trainees.tensors, strict=True)]
                for name, (digest, offered) in zip(names, offers, strict=True):
                    meeting.offer(name, meeting.round, digest, offered, Figures())
                meeting.close()
                sent += len(offers[0][1])
                for site, tensors in zip(sites, trainees.tensors, strict=True):
                    outcome, average = meeting.outcome(site.name, site.round), meeting.average(site.round)
                    assert outcome is not None
                    site.apply(tensors, outcome, average)
                received += len(average)
        assert len({site.agreed.digest for site in sites}) == 1
    return {
        "perplexity": perplexity_of(trainees.tensors[0], first, held_N),
        "sent_bytes_per_site": sent,
        "received_bytes_per_site": received,
        "rounds": terms.rounds,
    }


def lacking(result: dict[str, Any], seed: int) -> list[Setting]:
    done = [run["setting"] for run in result["runs"] if run["seed"] == seed]
    return [setting for setting in GRID if not any(same(each, setting) for each in done)]


def same(done: dict[str, Any], setting: Setting) -> bool:
    return done in (asdict(setting), asdict(setting) | EARLIER)


def read() -> dict[str, Any]:
    if not RESULT.exists():
        return {"runs": []}
    stored: dict[str, Any] = json.loads(RESULT.read_text())
    if stored["size"] != asdict(SIZE):
        raise SystemExit(f"{RESULT} was measured with another size; move it away first")
    return stored


def add(run: dict[str, Any], train_tokens: int) -> None:
    with FileLock(f"{RESULT}.lock"):
        stored = read()
        stored |= {
            "command": command_line(),
            "commit": commit(),
            "threads": 1,
            "machine": {"cpu": processor(), "python": platform.python_version(), "torch": torch.__version__},
            "size": asdict(SIZE),
            "sequences_per_step": SEQUENCES,
            "steps": STEPS,
            "steps_before": BEFORE,
            "train_tokens": train_tokens,
        }
        if (run["setting"], run["seed"]) not in [(done["setting"], done["seed"]) for done in stored["runs"]]:
            stored["runs"].append(run)
        save(RESULT, stored)


def table() -> None:
    """Print the mean and standard deviation over seeds of held-out perplexity, and the bytes per site and token."""
    stored = read()
    tokens = STEPS * SEQUENCES * SIZE.length
    for setting in GRID:
        runs = [run for run in stored["runs"] if same(run["setting"], setting)]
        if not runs:
            continue
        result = [run["perplexity"] for run in runs]
        spread = f" ± {statistics.stdev(result):.2f}" if len(result) > 1 else ""
        n = setting.sites
        sent = runs[0].get("sent_bytes_per_site", 0) / (tokens / n)
        ring = 2 * (n - 1) / n * 4 * runs[0]["parameters"] * STEPS / (tokens / n)
        fewer = f"{ring / sent:,.0f}" if sent and n > 1 else "–"
        how = f"H = {setting.inner_steps}, {setting.kind}" if setting.inner_steps else "data-parallel"
        print(f"| {n} | {how} | {statistics.mean(result):.2f}{spread} | {sent:,.1f} | {fewer} | {len(runs)} |")  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--table", action="store_true", help="print the results and train nothing")
    arguments = parser.parse_args()
    if arguments.table:
        table()
        return
    torch.set_num_threads(1)
    train_N, held_N = tokens(SIZE)
    for seed in arguments.seeds:
        if not lacking(read(), seed):
            continue
        first = start(train_N, seed)
        before = perplexity(first.model, held_N, SIZE)
        count = sum(tensor.numel() for tensor in first.tensors.values())
        while settings := lacking(read(), seed):
            setting, started_s = settings[0], time.process_time()
            result = sparse(setting, first, held_N) if setting.inner_steps else dense(first, held_N)
            cpu_s = round(time.process_time() - started_s, 1)
            run = {
                "setting": asdict(setting),
                "seed": seed,
                "parameters": count,
                "perplexity_before": before,
                "cpu_s": cpu_s,
            }
            add(run | result, len(train_N))
            print(f"{setting} seed {seed}: perplexity {result['perplexity']:.3f}, {cpu_s} s", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
