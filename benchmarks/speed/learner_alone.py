"""Compare the learner with plain transformers loops on padded batches: forward, backward and optimizer step.

    python -m benchmarks.speed.learner_alone [--rounds 2] [--dtypes bfloat16]
    python -m benchmarks.speed.learner_alone --rounds 1 --dtypes float32 --lengths 512 --label float32
    python -m benchmarks.speed.learner_alone --rounds 2 --dtypes float32 --lengths 512 --kinds equal --label equal-float32

The model is SmolLM2-135M on all cores. Sequences have at most 512 or 4096 tokens. They are either equally long or ragged
(lengths uniform from an eighth of the maximum to the maximum, seed 0). The systems take turns on the same data. Each trains
every token after the first with -advantage * logp and makes one optimizer step.

    shoal     Policy.update: fp32 masters, all computation in the dtype, trees packed into rows without padding
    autocast  AutoModelForCausalLM under torch.autocast, with fp32 weights, so it loses no small updates either. Batches are
              in the given order and right-padded, and padding has the label -100. The loss is the model's own, and the
              optimizer torch.optim.AdamW(fused=True)
    rounded   as autocast, but with weights and moments in bf16. It keeps no masters, so it loses updates that are smaller
              than a bf16 step

Tokens per second count real tokens. MFU is the FLOPs of real tokens (learner/report.py: no padding, no recomputation)
divided by seconds and by the peak. The peak is the fastest of several square matrix products in that dtype, measured before
and after. Writes benchmarks/results/learner_alone.json.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.common.machine import RESULTS, about, save
from shoal.config.recipe import LearnerSection, LossSection
from shoal.learner.batch import micro_batches
from shoal.learner.groups import Group
from shoal.learner.policy import Policy
from shoal.learner.report import forward_flops, shape_of
from shoal.model.sources import SMOLLM2, resolve

PATH = RESULTS / "learner_alone.json"
ROW_TOKENS = 4096  # tokens that each system computes at once
KINDS = ["equal", "ragged"]
BATCHES = {512: (8, 8), 4096: (1, 2)}  # by maximum length: sequences in one update, if equal and if ragged
LR = 1e-6

System = Callable[[list[list[int]]], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--label", help="write results/learner_alone-LABEL.json instead")
    arguments = parser.parse_args()
    path = PATH.with_stem(f"{PATH.stem}-{arguments.label}") if arguments.label else PATH
    result: dict[str, Any] = about() | {"cases": []}
    for dtype in arguments.dtypes:
        peak = matmul_peak(getattr(torch, dtype))
        systems = {"shoal": make_shoal(dtype), "autocast": make_plain("float32", dtype)}
        if dtype == "bfloat16":
            systems["rounded"] = make_plain(dtype, dtype)
        for longest in arguments.lengths:
            for kind in arguments.kinds:
                n = BATCHES[longest][KINDS.index(kind)]
                sequences = make_sequences(longest, n, ragged=kind == "ragged")
                seconds = take_turns(systems, sequences, arguments.rounds)
                peak = max(peak, matmul_peak(getattr(torch, dtype)))
                result["cases"].append(figures(dtype, f"{kind} {longest}", sequences, seconds, peak))
                sys.stdout.write(f"{result['cases'][-1]}\n")
                sys.stdout.flush()
                save(path, result)


def make_sequences(longest: int, n: int, *, ragged: bool) -> list[list[int]]:
    draw = random.Random(0)
    lengths = [draw.randint(longest // 8, longest) if ragged else longest for _ in range(n)]
    return [[draw.randrange(1000, 40_000) for _ in range(length)] for length in lengths]


def make_shoal(dtype: str) -> System:
    section = LearnerSection(lr=LR, warmup_steps=0, row_tokens=ROW_TOKENS, loss=LossSection(beta=0.0, entropy=0.0))
    policy = Policy(resolve(SMOLLM2), section, dtype, "cpu", 1.0)  # type: ignore[arg-type]

    def update(sequences: list[list[int]]) -> None:
        groups = [Group("s", 0, [s[0]], [s[1:]], [[-5.0] * (len(s) - 1)], [1.0]) for s in sequences]
        rows = micro_batches(groups, row_tokens=ROW_TOKENS, normalize_std=False)
        policy.update(rows, sum(group.n_tokens for group in groups))

    return update


def make_plain(weights: str, compute: str) -> System:
    model: Any = AutoModelForCausalLM.from_pretrained(resolve(SMOLLM2), dtype=getattr(torch, weights))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def update(sequences: list[list[int]]) -> None:
        n_tokens = sum(map(len, sequences)) - len(sequences)
        per_batch = max(1, ROW_TOKENS // max(map(len, sequences)))
        for start in range(0, len(sequences), per_batch):
            batch = pad(sequences[start : start + per_batch])
            with torch.autocast("cpu", getattr(torch, compute), enabled=weights != compute):
                loss = model(**batch, num_items_in_batch=n_tokens).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def pad(sequences: list[list[int]]) -> dict[str, Tensor]:
    width = max(map(len, sequences))
    ids = torch.tensor([s + [0] * (width - len(s)) for s in sequences])
    mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def take_turns(systems: dict[str, System], sequences: list[list[int]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each system in each round, after a warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(rounds + 1):
        for name, system in systems.items():
            started_s = time.perf_counter()
            system(sequences)
            if turn:
                seconds[name].append(time.perf_counter() - started_s)
    return seconds


def matmul_peak(dtype: torch.dtype) -> float:
    """Return the GFLOP/s of the fastest of several square matrix products."""
    best = 0.0
    for size in (512, 1024, 2048):
        a = torch.randn(size, size).to(dtype)
        for _ in range(8):
            started_s = time.perf_counter()
            torch.matmul(a, a)
            best = max(best, 2 * size**3 / (time.perf_counter() - started_s) / 1e9)
    return best


def figures(
    dtype: str, case: str, sequences: list[list[int]], seconds: dict[str, list[float]], peak: float
) -> dict[str, Any]:
    n_tokens = sum(map(len, sequences))
    flops = 3 * sum(forward_flops(SHAPE, 1, [len(s) - 1]) for s in sequences)
    row: dict[str, Any] = {"dtype": dtype, "case": case, "lengths": [len(s) for s in sequences], "peak_gflops": peak}
    for name, each_s in seconds.items():
        median_s = statistics.median(each_s)
        row[name] = {"seconds": each_s, "tokens_per_s": n_tokens / median_s, "mfu": flops / median_s / peak / 1e9}
        pairs = zip(seconds["shoal"], each_s, strict=True)
        row[name]["shoal_times_faster"] = statistics.median(other / own for own, other in pairs)
    return row


if __name__ == "__main__":
    SHAPE = shape_of(AutoModelForCausalLM.from_pretrained(resolve(SMOLLM2)))
    main()
