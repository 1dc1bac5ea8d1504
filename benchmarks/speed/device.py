"""Measure how fast the learner, a worker and the validator compute on a device. `benchmarks/gpu.sh` runs this.

    python -m benchmarks.speed.device learner worker validator --device cuda --out parts.json
    torchrun --nproc-per-node 2 -m benchmarks.speed.device learner --device cuda --out ranks.json     FSDP2 over NCCL

    learner    one update of `--rows` rows of `--row-tokens` tokens, filled with groups of random tokens: tokens/s of
               completions, MFU, peak memory of the device
    worker     `--sequences` completions of `--tokens` tokens, by the torch engine, and by vLLM if SHOAL_VLLM_PYTHON is set
    validator  every check of one honest submission of `--config`: completion tokens/s

Figures are medians of `--repeats` after a warm-up. MFU is relative to the speed of a matrix product on the same device.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from shoal import config
from shoal.cli.calibrate import RUN
from shoal.config.recipe import LearnerSection
from shoal.engine.protocol import Engine, Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.engine.vllm.client import PYTHON, VllmEngine
from shoal.learner.batch import micro_batches
from shoal.learner.groups import Group
from shoal.learner.policy import Policy
from shoal.learner.ranks import Ranks
from shoal.learner.report import shape_of, training_flops
from shoal.model.dtype import DtypeName, measure_gflops, pick
from shoal.model.sources import resolve
from shoal.protocol.identity import Identity
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Case
from shoal.validator.judge import Judge
from shoal.worker.produce import Producer

from ..common.machine import about, save

PROMPT_TOKENS, GROUP = 40, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--config", type=Path, default=Path("quickstart"), help="its model is measured")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, default=16_384)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="write the figures there")
    arguments = parser.parse_args()
    ranks = Ranks.start(60.0, 60.0)
    dtype, _ = pick("auto", arguments.device)
    result: dict[str, Any] = {
        **about(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "ranks": ranks.size,
        "dtype": dtype,
    }
    for part in arguments.parts:
        result[part] = PARTS[part](arguments, dtype, ranks)
        if ranks.leads:
            save(arguments.out, result)
            sys.stdout.write(f"{part}: {json.dumps(result[part])}\n")
    ranks.stop()


def learner(arguments: argparse.Namespace, dtype: DtypeName, ranks: Ranks) -> dict[str, Any]:
    settings = config.load(arguments.config)
    section = LearnerSection(row_tokens=arguments.row_tokens, optimizer_steps_per_step=1)
    folder = resolve(settings.model.name)
    policy = Policy(folder, section, dtype, arguments.device, 1.0, ranks)
    draw, words = random.Random(0), vocabulary(folder)
    lengths = [PROMPT_TOKENS, *[arguments.tokens] * GROUP]
    groups = []
    for _ in range(arguments.rows * (arguments.row_tokens // sum(lengths))):
        prompt, *completions = ([draw.randrange(words) for _ in range(length)] for length in lengths)
        logprobs = [[-5.0] * len(completion) for completion in completions]
        groups.append(Group("s", 0, prompt, completions, logprobs, [float(n % 2) for n in range(GROUP)]))
    rows = micro_batches(groups, row_tokens=arguments.row_tokens, normalize_std=False)
    n_tokens = sum(group.n_tokens for group in groups)
    step_s = measure(lambda: policy.update(rows, n_tokens), arguments)
    flops = training_flops(shape_of(policy.model), groups, extra_forwards=0)
    peak_gflops = measure_gflops(getattr(torch, dtype), arguments.device) * ranks.size
    return {
        "step_s": step_s,
        "tokens_per_s": n_tokens / step_s,
        "peak_gflops": peak_gflops,
        "mfu": flops / step_s / peak_gflops / 1e9,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if arguments.device == "cuda" else None,
    }


def worker(arguments: argparse.Namespace, dtype: DtypeName, ranks: Ranks) -> dict[str, Any]:
    folder = resolve(config.load(arguments.config).model.name)
    figures = {"torch": generate(TorchEngine(dtype, arguments.device), folder, arguments)}
    if os.environ.get(PYTHON):
        with closing(VllmEngine(dtype)) as engine:
            figures["vllm"] = generate(engine, folder, arguments)
    return figures


def generate(engine: Engine, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure completions of a fixed length, in groups, with seeded sampling and hidden states."""
    engine.load(folder)
    groups = max(1, arguments.sequences // GROUP)
    prompts = [[(7 * group + at) % vocabulary(folder) for at in range(PROMPT_TOKENS)] for group in range(groups)]
    seeds = [list(range(GROUP * group, GROUP * group + GROUP)) for group in range(groups)]
    sampling = Sampling(1.0, arguments.tokens, ())
    seconds = measure(lambda: engine.generate(prompts, seeds, sampling), arguments)
    return {"seconds": seconds, "tokens_per_s": groups * GROUP * arguments.tokens / seconds}


def validator(arguments: argparse.Namespace, dtype: DtypeName, ranks: Ranks) -> dict[str, Any]:
    settings = config.load(arguments.config, [f"model.device={arguments.device}"])
    folder = resolve(settings.model.name)
    producer = Producer(settings, RUN, Identity.generate(), TorchEngine(dtype, arguments.device))
    producer.load(folder, 0)
    assignment = offline_assignment(producer.config, producer.identity.public, 0)
    with Judge(settings, RUN, dtype) as judge:
        judge.load(folder)
        case = judge.open(assignment, producer.identity.public, producer.submission(assignment))
        if not isinstance(case, Case):
            raise SystemExit(f"the validator cannot read honest work: {case.detail}")

        def examine() -> None:
            if findings := [one.finding for one in judge.examine([case]) if one.finding]:
                raise SystemExit(f"the validator rejected honest work: {findings}")

        seconds = measure(examine, arguments)
        n_tokens = sum(len(row.tokens) for row in case.rows)
    return {"seconds": seconds, "tokens": n_tokens, "tokens_per_s": n_tokens / seconds}


def vocabulary(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def measure(work: Callable[[], Any], arguments: argparse.Namespace) -> float:
    """Return the median seconds until the device has finished `work`. The first run is a warm-up and does not count."""
    seconds = []
    for _ in range(arguments.repeats + 1):
        started_s = time.perf_counter()
        work()
        if arguments.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds[1:])


PARTS: dict[str, Callable[[argparse.Namespace, DtypeName, Ranks], dict[str, Any]]] = {
    "learner": learner,
    "worker": worker,
    "validator": validator,
}

if __name__ == "__main__":
    main()
