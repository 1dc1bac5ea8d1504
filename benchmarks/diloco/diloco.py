"""Compare DiLoCo with data-parallel training on equally many tokens, for a small llama on real text, in one process.

    python -m benchmarks.diloco.diloco --seeds 0 1 2        run the settings missing from benchmarks/results/diloco.json
    python -m benchmarks.diloco.diloco --grid ablations     OpenDiLoCo's ablations, in diloco_ablations.json
    python -m benchmarks.diloco.diloco --table              print that file as a table

Each step trains on the same `SEQUENCES` sequences in every setting. Data-parallel training computes one gradient over all of
them. With n sites, each site makes an AdamW step on 1/n of them. As in the paper, a model is first trained data-parallel
for a while. All sites start with its weights and moments, and so does data-parallel training.

The ablations also train one site alone: with its own share of each step's sequences, and with n times as many steps of that
share. Others have a model three times as large, or three times as many steps. The learning rate always decays to a tenth.

The sites are simulated: they train in turn in this process. Their offers, averages and outer steps are made by the package's
own code, and the byte counts are the sizes of the files that it sends. A ring all-reduce of float32 gradients sends
2·(n−1)/n·4 bytes per parameter and step. Several processes may add to one file.
"""

import argparse
import json
import statistics
import tempfile
import time
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from benchmarks.common.machine import RESULTS, about, save
from benchmarks.diloco.diloco_model import Size, Trainee, Trainees, perplexity, tokens
from shoal.diloco.agreed import Agreed, Shapes
from shoal.diloco.codec import Kind
from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import Figures, Greeting, Terms
from shoal.diloco.site import Site

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
    batch: int = SEQUENCES  # sequences of a step
    steps: int = STEPS
    width: int = SIZE.width


WIDE = 336  # three times as many parameters
LONG = 3 * STEPS
GRIDS = {
    "diloco": [
        Setting(1, 0),
        *(Setting(4, 50, kind) for kind in ("fp32", "fp16", "int8", "int4")),
        *(Setting(sites, 50) for sites in (8, 2, 1)),
        *(Setting(sites, steps) for steps in (500, 100) for sites in (4, 8, 2, 1)),
    ],
    "diloco_ablations": [
        Setting(1, 0),
        Setting(4, 50),
        Setting(1, 0, batch=SEQUENCES // 4),
        Setting(1, 0, batch=SEQUENCES // 4, steps=4 * STEPS),
        *(
            Setting(sites, 50, kind)
            for sites, kind in ((2, "fp16"), (2, "fp32"), (4, "fp32"), (8, "fp16"), (8, "fp32"))
        ),
        *(Setting(sites, steps, width=WIDE) for sites, steps in ((1, 0), (4, 50))),
        *(Setting(sites, steps, steps=LONG) for sites, steps in ((1, 0), (4, 500), (4, 100))),
    ],
}
EARLIER = {"fragments", "delay", "keep"}  # only runs of an earlier commit recorded these settings


def start(train_N: Tensor, seed: int, width: int) -> Trainee:
    """Return the model from which every setting starts. It was trained for `BEFORE` data-parallel steps."""
    trainee = Trainee(train_N, seed, list(range(SEQUENCES)), replace(SIZE, width=width))
    for step in range(BEFORE):
        trainee.step(step)
    return trainee


def dense(setting: Setting, first: Trainee, held_N: Tensor) -> dict[str, Any]:
    trainees = Trainees(first, 1, setting.batch)
    for step in range(setting.steps):
        trainees.step(BEFORE + step, BEFORE + step * STEPS // setting.steps)
    return {"perplexity": perplexity_of(trainees.tensors[0], first, held_N)}


def perplexity_of(tensors: dict[str, Tensor], first: Trainee, held_N: Tensor) -> float:
    network = deepcopy(first.model)
    network.load_state_dict(tensors, strict=False)  # of tied weights, only one name is in `tensors`
    return perplexity(network, held_N, SIZE)


def sparse(setting: Setting, first: Trainee, held_N: Tensor) -> dict[str, Any]:
    trainees = Trainees(first, setting.sites, setting.batch)
    rounds = setting.steps // setting.inner_steps
    terms = Terms(Shapes.of(first.tensors), rounds, kind=setting.kind, sites=setting.sites, wait_s=1e9)
    sent = received = 0
    with tempfile.TemporaryDirectory() as folder:
        agreed = Agreed.of(first.tensors, terms.shapes)
        meeting = Meeting(Path(folder), terms, {}, "benchmark", lambda: agreed)
        names = [f"site-{number}" for number in range(setting.sites)]
        sites = [Site(name, terms, Agreed.of(first.tensors, terms.shapes)) for name in names]
        for name in names:
            meeting.join(name, Greeting(about={}, placed=True))
        for step in range(1, setting.steps + 1):
            trainees.step(BEFORE + step - 1, BEFORE + (step - 1) * STEPS // setting.steps)
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


def lacking(grid: str, seed: int) -> list[Setting]:
    done = [run["setting"] for run in read(grid)["runs"] if run["seed"] == seed]
    return [setting for setting in GRIDS[grid] if not any(same(each, setting) for each in done)]


def same(done: dict[str, Any], setting: Setting) -> bool:
    known = {name: value for name, value in done.items() if name not in EARLIER}
    return Setting(**known) == setting


def result_file(grid: str) -> Path:
    return RESULTS / f"{grid}.json"


def read(grid: str) -> dict[str, Any]:
    path = result_file(grid)
    if not path.exists():
        return {"runs": []}
    stored: dict[str, Any] = json.loads(path.read_text())
    if stored["size"] != asdict(SIZE):
        raise SystemExit(f"{path} was measured with another size; move it away first")
    return stored


def add(grid: str, run: dict[str, Any], train_tokens: int) -> None:
    with FileLock(f"{result_file(grid)}.lock"):
        stored = read(grid)
        stored |= {
            **about(),
            "threads": 1,
            "size": asdict(SIZE),
            "sequences_per_step": SEQUENCES,
            "steps": STEPS,
            "steps_before": BEFORE,
            "train_tokens": train_tokens,
        }
        if (run["setting"], run["seed"]) not in [(done["setting"], done["seed"]) for done in stored["runs"]]:
            stored["runs"].append(run)
        save(result_file(grid), stored)


def table(grid: str) -> None:
    """Print the mean and standard deviation over seeds of held-out perplexity, and the bytes per site and token."""
    stored = read(grid)
    for setting in GRIDS[grid]:
        runs = [run for run in stored["runs"] if same(run["setting"], setting)]
        if not runs:
            continue
        result = [run["perplexity"] for run in runs]
        spread = f" ± {statistics.stdev(result):.2f}" if len(result) > 1 else ""
        n, tokens = setting.sites, setting.steps * setting.batch * SIZE.length
        sent = runs[0].get("sent_bytes_per_site", 0) / (tokens / n)
        ring = 2 * (n - 1) / n * 4 * runs[0]["parameters"] * setting.steps / (tokens / n)
        fewer = f"{ring / sent:,.0f}" if sent and n > 1 else "–"
        how = f"H = {setting.inner_steps}, {setting.kind}" if setting.inner_steps else "data-parallel"
        size = f"{setting.steps} × {setting.batch}, width {setting.width}"
        print(f"| {n} | {how} | {size} | {statistics.mean(result):.2f}{spread} | {sent:,.1f} | {fewer} | {len(runs)} |")  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--grid", choices=list(GRIDS), default="diloco")
    parser.add_argument("--table", action="store_true", help="print the results and train nothing")
    arguments = parser.parse_args()
    grid = arguments.grid
    if arguments.table:
        table(grid)
        return
    torch.set_num_threads(1)
    train_N, held_N = tokens(SIZE)
    for seed in arguments.seeds:
        first_of = cache(lambda width, seed=seed: start(train_N, seed, width))
        while settings := lacking(grid, seed):
            setting = settings[0]
            first = first_of(setting.width)
            before, started_s = perplexity(first.model, held_N, SIZE), time.process_time()
            result = (sparse if setting.inner_steps else dense)(setting, first, held_N)
            cpu_s = round(time.process_time() - started_s, 1)
            run = {
                "setting": asdict(setting),
                "seed": seed,
                "parameters": sum(tensor.numel() for tensor in first.tensors.values()),
                "perplexity_before": before,
                "cpu_s": cpu_s,
            }
            add(grid, run | result, len(train_N))
            print(f"{setting} seed {seed}: perplexity {result['perplexity']:.3f}, {cpu_s} s", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
