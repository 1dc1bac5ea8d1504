"""Measure how much of a LoRA learner's gain the published version keeps: with separate adapters, and merged into bf16.

    python -m benchmarks.learning.lora_gain --out benchmarks/results/lora_gain.json

The gain is the change of the batch's advantage-weighted logprobs over a few updates. "apart" keeps the adapters separate,
as a published version does. "merged" rounds weight + adapter to bf16, as a plain bf16 model does.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.machine import about, save
from shoal.config.recipe import LearnerSection
from shoal.engine.selftest import fixed_tokens
from shoal.learner.batch import MicroBatch, micro_batches
from shoal.learner.groups import Group
from shoal.learner.masters import merge_adapters
from shoal.learner.policy import Policy
from shoal.model.load import WEIGHTS, load_model, save_model
from shoal.model.sources import SMOLLM2, resolve
from shoal.model.training import Scorer

UPDATES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [measured(resolve(arguments.model), lr, arguments.dtype) for lr in (1e-6, 1e-5, 1e-4)]
    result = {
        **about(),
        "model": arguments.model,
        "dtype": arguments.dtype,
        "updates": UPDATES,
        "rows": rows,
    }
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    if arguments.out:
        save(arguments.out, result)


def measured(folder: Path, lr: float, dtype: str) -> dict[str, float]:
    torch.manual_seed(0)
    section = LearnerSection(lr=lr, warmup_steps=0, lora={"rank": 16}, loss={"beta": 0.0, "entropy": 0.0})
    policy = Policy(folder, section, dtype, "cpu", 1.0)
    [micro] = micro_batches(groups(policy.model.config.vocab_size), row_tokens=4096, normalize_std=False)
    before = gain(policy.scorer, micro)
    for _ in range(UPDATES):
        policy.update([micro], len(micro.advantage_N))
    learners = gain(policy.scorer, micro) - before
    with tempfile.TemporaryDirectory() as scratch:
        version, merged = Path(scratch) / "version", Path(scratch) / "merged"
        save_model(policy.model, policy.tokenizer, version, policy.published(), policy.stored)
        apart = gain(Scorer(load_model(version, dtype)), micro) - before
        merge_adapters(version, merged)
        rounded = {name: tensor.bfloat16() for name, tensor in load_file(merged / WEIGHTS).items()}
        save_file(rounded, merged / WEIGHTS, metadata={"format": "pt"})
        once = gain(Scorer(load_model(merged, dtype)), micro) - before
    return {"lr": lr, "learner": learners, "apart": apart / learners, "merged": once / learners}


def groups(vocabulary: int) -> list[Group]:
    made = []
    for number in range(2):
        completions = [fixed_tokens(f"completion {number} {i}", 32, vocabulary) for i in range(4)]
        prompt = fixed_tokens(f"prompt {number}", 32, vocabulary)
        made.append(Group("s", 0, prompt, completions, [[-8.0] * 32] * 4, [0.0, 1.0, 0.0, 1.0]))
    return made


@torch.no_grad()
def gain(scorer: Scorer, micro: MicroBatch) -> float:
    logp_N, _ = scorer(micro.pack, 1.0, False)
    return float((logp_N.double() * micro.advantage_N).sum())


if __name__ == "__main__":
    main()
