"""What the validator's checks measure on honest work and on three lies, worker and validator in fp32 and bf16.

    python benchmarks/calibration.py

Writes benchmarks/results/calibration.json: for each model and pair of dtypes the least and the greatest figure over a
few submissions of 64 (SmolLM2) or 256 (tiny) rollouts. The limits in `[validator]` of the config come from these.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe

from shoal import config, tasks, toploc
from shoal.config import Config
from shoal.model.load import eos_ids, load_model, load_tokenizer
from shoal.model.sampling import replay_margins, token_logprobs
from shoal.model.sources import resolve
from shoal.model.tree import Tree, forward_hidden, pack
from shoal.rollout.engine import Sampling
from shoal.rollout.torch_engine import TorchEngine
from shoal.tasks.prompt import prompt_tokens
from shoal.testing.cheats import round_to_4_bits_

HERE = Path(__file__).parent
SUBMISSIONS = 2


def main() -> None:
    torch.set_num_threads(1)
    result: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "machine": describe(), "models": {}}
    for name, groups in (("tiny", 16), ("quickstart", 8)):
        settings = config.load(HERE.parent / "configs" / f"{name}.toml")
        result["models"][settings.model.name] = measure(settings, groups)
    path = HERE / "results" / "calibration.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def measure(settings: Config, groups: int) -> dict[str, dict[str, list[float]]]:
    folder = resolve(settings.model.name)
    validators = {dtype: load_model(folder, dtype) for dtype in ("float32", "bfloat16")}
    lies: dict[str, tuple[Callable[[torch.Tensor], None] | None, float]] = {
        "honest": (None, 1.0),
        "4-bit weights": (round_to_4_bits_, 1.0),
        "8-bit weights": (round_to_8_bits_, 1.0),
        "half the temperature": (None, 0.5),
    }
    found = {}
    for lie, (spoil, factor) in lies.items():
        for dtype in ("float32", "bfloat16"):
            engine = TorchEngine(dtype)
            engine.load(folder)
            for module in engine.model.base_model.layers.modules() if spoil else ():
                if isinstance(module, torch.nn.Linear):
                    spoil(module.weight.data)
            figures: dict[str, list[dict[str, float]]] = {name: [] for name in validators}
            for number in range(SUBMISSIONS):
                made = generate(settings, folder, engine, groups, number, factor)
                for name, model in validators.items():
                    figures[name].append(check(model, settings.sampling.temperature, *made))
            for name, rows in figures.items():
                key = f"{lie}: worker {dtype}, validator {name}"
                found[key] = {k: [round(f(row[k] for row in rows), 4) for f in (min, max)] for k in rows[0]}
                sys.stdout.write(f"{settings.model.name} {key} {found[key]}\n")
    return found


def generate(
    settings: Config, folder: Path, engine: TorchEngine, groups: int, number: int, factor: float
) -> tuple[Any, ...]:
    tokenizer, task_set, size = load_tokenizer(folder), tasks.load(settings.tasks), settings.sampling.group_size
    chosen = [task_set.train[(number * groups + g) % len(task_set.train)] for g in range(groups)]
    prompts = [prompt_tokens(tokenizer, settings.tasks, task, 0) for task in chosen]
    seeds = [[(number * groups + g) * size + i for i in range(size)] for g in range(groups)]
    sampling = Sampling(settings.sampling.temperature * factor, settings.sampling.max_tokens, eos_ids(folder))
    return prompts, seeds, engine.generate(prompts, seeds, sampling)


@torch.inference_mode()
def check(model: Any, temperature: float, prompts: Any, seeds: Any, groups: Any) -> dict[str, float]:
    trees = [Tree(p, [c.tokens for c in group]) for p, group in zip(prompts, groups, strict=True)]
    hidden_NH = torch.cat([forward_hidden(model, pack([tree], tree.n_tokens)) for tree in trees])
    completions = [completion for group in groups for completion in group]
    tokens_N = torch.tensor([token for c in completions for token in c.tokens])
    lengths = [len(c.tokens) for c in completions]
    flat_seeds = [s for s, n in zip([s for group in seeds for s in group], lengths, strict=True) for _ in range(n)]
    positions = [position for n in lengths for position in range(n)]
    logits_NV = model.lm_head(hidden_NH).float()
    margins_N = replay_margins(logits_NV, tokens_N, flat_seeds, positions, temperature)
    claimed_N = torch.tensor([logprob for c in completions for logprob in c.logprobs])
    proofs = toploc.build_many([c.hidden_TH for c in completions])
    chunks = [c for row in toploc.verify_many(list(hidden_NH.bfloat16().split(lengths)), proofs) for c in row]
    return {
        "proof_exponent_mean": sum(c.exponent_mismatches for c in chunks) / len(chunks),
        "proof_exponent_max": float(max(c.exponent_mismatches for c in chunks)),
        "proof_mantissa_mean": sum(c.mantissa_error_mean for c in chunks) / len(chunks),
        "proofs_failed_frac": sum(not toploc.BFLOAT16.passes(c) for c in chunks) / len(chunks),
        "logprob_error_mean": float((claimed_N - token_logprobs(logits_NV / temperature, tokens_N)).abs().mean()),
        "margin_mean": float(margins_N.clamp(max=1).mean()),
        "mismatch_frac": float((margins_N > 0.75).float().mean()),
    }


def round_to_8_bits_(weight_OI: torch.Tensor) -> None:
    scale = weight_OI.abs().amax(-1, keepdim=True) / 127
    weight_OI.copy_((weight_OI / scale).round() * scale)


if __name__ == "__main__":
    main()
