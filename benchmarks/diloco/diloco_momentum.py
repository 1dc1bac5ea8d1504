"""Show why many short rounds overshoot with the papers' outer momentum. The sites of a small llama are simulated in turn.

    python -m benchmarks.diloco.diloco_momentum --steps 400 --seeds 0 1 --out benchmarks/results/diloco_momentum.json

A setting is a number of inner steps H, an outer momentum μ, an outer learning rate η and an inner learning rate. The result
has for each round the norm of the average pseudo-gradient, its cosine with that of the previous round, and the length of
the outer step divided by the norm (`gain`). Every 50 steps it has the held-out loss of the agreed parameters. `warmup` is
the number of rounds over which μ rises linearly from 0.

With Nesterov momentum, the gain of the first round is η(1 + μ) = 1.33 for η = 0.7 and μ = 0.9. The gain stays near that
while the directions of successive rounds differ. If the direction stays the same, the gain tends to η/(1 − μ) = 7.
"""

import argparse
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.machine import about, save
from benchmarks.diloco.diloco_model import Size, Trainee, perplexity, tokens
from shoal.diloco.agreed import Shapes, outer_step, pseudo_gradient

SITES = 2
EVERY = 50  # inner steps between two measurements of the held-out loss


@dataclass(frozen=True)
class Setting:
    inner_steps: int
    momentum: float
    lr: float = 0.7
    inner_scale: float = 1.0  # factor of the inner learning rate
    warmup: int = 0  # rounds


GRID = [
    Setting(10, 0.9),
    Setting(10, 0.0, 1.0),
    Setting(10, 0.5),
    Setting(10, 0.9, 0.1),
    Setting(10, 0.9, inner_scale=1 / 7),
    Setting(10, 0.9, warmup=20),
    Setting(50, 0.9),
    Setting(50, 0.0, 1.0),
    Setting(50, 0.5),
    Setting(50, 0.9, 0.1),
]


def train(setting: Setting, data: tuple[Tensor, Tensor], seed: int, size: Size) -> dict[str, Any]:
    inner = replace(size, lr=size.lr * setting.inner_scale)
    trainees = [Trainee(data[0], seed, [number], inner) for number in range(SITES)]
    shapes = Shapes.of(trainees[0].tensors)
    agreed = shapes.gather(trainees[0].tensors)
    velocity, before, rounds = torch.zeros_like(agreed), torch.zeros_like(agreed), []
    for step in range(1, size.steps + 1):
        for trainee in trainees:
            trainee.step(step - 1)
        if step % setting.inner_steps:
            continue
        changes = [pseudo_gradient(agreed, shapes.gather(trainee.tensors)) for trainee in trainees]
        average = torch.stack(changes).mean(0).float()
        momentum = setting.momentum * min(1.0, len(rounds) / setting.warmup) if setting.warmup else setting.momentum
        moved, velocity = outer_step(agreed, velocity, average, lr=setting.lr, momentum=momentum)
        norm = float(average.norm())
        cosine = float(average @ before) / max(norm * float(before.norm()), 1e-30)
        gain, agreed, before = float((moved - agreed).norm()) / norm, moved, average
        for trainee in trainees:
            shapes.scatter_(trainee.tensors, agreed)
        rounds.append({"step": step, "cosine": cosine, "norm": norm, "gain": gain})
        if step % EVERY == 0:
            rounds[-1]["heldout_loss"] = math.log(perplexity(trainees[0].model, data[1], size))
    return {"perplexity": math.exp(rounds[-1]["heldout_loss"]), "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = Size(steps=arguments.steps, lr=arguments.lr, width=arguments.width)
    data = tokens(size)
    record: dict[str, Any] = {
        **about(),
        "threads": 1,
        "sites": SITES,
        "tokens_per_step_and_site": size.sequences * size.length,
        "size": asdict(size),
        "runs": [],
    }
    for seed in arguments.seeds:
        for setting in GRID:
            started_s = time.process_time()
            run = {"setting": asdict(setting), "seed": seed} | train(setting, data, seed, size)
            record["runs"].append(run | {"cpu_s": round(time.process_time() - started_s, 1)})
            save(arguments.out, record)
            late = run["rounds"][len(run["rounds"]) // 2 :]
            mean = {name: sum(each[name] for each in late) / len(late) for name in ("cosine", "gain")}
            print(f"{setting} seed {seed}: perplexity {run['perplexity']:.2f}, {mean}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
