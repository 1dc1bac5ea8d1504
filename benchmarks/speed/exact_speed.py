"""Measure the cost of exact numerics in generation, the validator's prefill and the learner's update.

    python -m benchmarks.speed.exact_speed [--rounds 3] [--threads 2] [--dtypes bfloat16] [--models smollm2] [--parts decode]

Fast and exact numerics take turns, exact first in every other round, after a warm-up round. Each ratio is the median over
rounds of fast seconds divided by exact seconds: at 1 both are equally fast, at 0.9 exact numerics run at 0.9 of the speed.
Seconds are wall-clock. The process's CPU seconds are also recorded, because other processes disturb them less.

    decode   16 and 64 completions of 24 tokens each, 8 for each prompt of 40 tokens
    prefill  hidden states and logprobs of every token, for 64 completions of 16 tokens (as in quickstart) and for 16
             completions of 200 tokens
    learner  one update on the same data as in prefill, with activations recomputed as in quickstart

A quiet machine needs about six minutes. `machine.load` in the results tells how busy it was.

Writes benchmarks/results/exact_speed.json with every timing.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.machine import RESULTS, about, save
from shoal.config.recipe import LearnerSection, LossSection
from shoal.engine.protocol import Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.learner.batch import micro_batches
from shoal.learner.groups import Group
from shoal.learner.policy import Policy
from shoal.model.load import load_model
from shoal.model.sources import SMOLLM2, TINY, resolve
from shoal.model.tree import Tree, forward_hidden, pack
from shoal.validator.prefill import VOCABULARY_ROWS, token_evidence

PATH = RESULTS / "exact_speed.json"
MODELS = {"smollm2": SMOLLM2, "tiny": TINY}
WAYS = ("fast", "exact")
DECODED = 24  # tokens of a completion
Way = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--models", nargs="+", default=["smollm2"], choices=list(MODELS))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result: dict[str, Any] = about() | {"load": os.getloadavg(), "cases": []}
    for name in arguments.models:
        for dtype in arguments.dtypes:
            for part in arguments.parts:
                for case, ways in PARTS[part](resolve(MODELS[name]), dtype).items():
                    measured = take_turns(ways, arguments.rounds)
                    result["cases"].append({"model": name, "dtype": dtype, "case": case} | measured)
                    sys.stdout.write(
                        f"{name} {dtype} {case}: {measured['ratio']:.3f} (CPU {measured['cpu_ratio']:.3f})\n"
                    )
                    sys.stdout.flush()
                    save(PATH, result)


def decode(folder: Path, dtype: Any) -> dict[str, dict[str, Way]]:
    engines = {way: TorchEngine(dtype, "cpu", way) for way in WAYS}  # type: ignore[arg-type]
    for engine in engines.values():
        engine.load(folder)
    vocabulary = engines["fast"].model.config.vocab_size
    cases = {}
    for rows in (64, 16):
        trees = made(vocabulary, rows // 8, 8, 40, 0)
        seeds = [[100 * g + i for i in range(8)] for g in range(len(trees))]

        def generate(way: str, trees: list[Tree] = trees, seeds: list[list[int]] = seeds) -> None:
            engines[way].generate([tree.prompt for tree in trees], seeds, Sampling(1.0, DECODED, ()))

        cases[f"decode {rows} x {DECODED}"] = ways(generate)
    return cases


def prefill(folder: Path, dtype: Any) -> dict[str, dict[str, Way]]:
    models = {way: load_model(folder, dtype, numerics=way) for way in WAYS}  # type: ignore[arg-type]

    def check(way: str, trees: list[Tree]) -> None:
        with torch.inference_mode():
            packed = pack(trees)
            hidden_NH = forward_hidden(models[way], packed)
            for start in range(0, len(hidden_NH), VOCABULARY_ROWS):
                logits_CV = models[way].lm_head(hidden_NH[start : start + VOCABULARY_ROWS])
                for row in range(0, len(logits_CV), 16):
                    at = start + row
                    token_evidence(logits_CV[row : row + 16].float(), packed.target_N[at : at + 16])

    return {
        f"prefill {case}": ways(lambda way, trees=trees: check(way, trees))  # type: ignore[misc]
        for case, trees in batches(models["fast"].config.vocab_size).items()
    }


def learner(folder: Path, dtype: Any) -> dict[str, dict[str, Way]]:
    section = LearnerSection(
        lr=1e-6,
        warmup_steps=0,
        row_tokens=2048,
        activation_checkpointing=True,
        loss=LossSection(beta=0.0, entropy=0.0),
    )
    policies = {way: Policy(folder, section, dtype, "cpu", 1.0, numerics=way) for way in WAYS}  # type: ignore[arg-type]

    def update(way: str, trees: list[Tree]) -> None:
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
        rows = micro_batches(groups, row_tokens=2048, normalize_std=False)
        policies[way].update(rows, sum(group.n_tokens for group in groups))

    return {
        f"learner {case}": ways(lambda way, trees=trees: update(way, trees))  # type: ignore[misc]
        for case, trees in batches(policies["fast"].model.config.vocab_size).items()
    }


PARTS = {"decode": decode, "prefill": prefill, "learner": learner}


def batches(vocabulary: int) -> dict[str, list[Tree]]:
    return {"64 x 16": made(vocabulary, 8, 8, 40, 16), "16 x 200": made(vocabulary, 2, 8, 60, 200)}


def made(vocabulary: int, groups: int, size: int, prompt: int, completion: int) -> list[Tree]:
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(5, vocabulary) for _ in range(count)]

    return [Tree(tokens(prompt), [tokens(completion) for _ in range(size)]) for _ in range(groups)]


def ways(run: Callable[[str], None]) -> dict[str, Way]:
    return {way: lambda way=way: run(way) for way in WAYS}  # type: ignore[misc]


def take_turns(ways: dict[str, Way], rounds: int) -> dict[str, Any]:
    wall_s: dict[str, list[float]] = {way: [] for way in ways}
    cpu_s: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in sorted(ways, reverse=bool(number % 2)):
            started_s, cpu_started_s = time.perf_counter(), time.process_time()
            ways[way]()
            if number:
                wall_s[way].append(time.perf_counter() - started_s)
                cpu_s[way].append(time.process_time() - cpu_started_s)
    return {"seconds": wall_s, "cpu_seconds": cpu_s, "ratio": ratio(wall_s), "cpu_ratio": ratio(cpu_s)}


def ratio(seconds: dict[str, list[float]]) -> float:
    return statistics.median(fast / exact for fast, exact in zip(seconds["fast"], seconds["exact"], strict=True))


if __name__ == "__main__":
    main()
