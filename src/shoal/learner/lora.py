"""Low-rank adapters in place of whole weights (`model/adapters`): what is trained, and what is left for others to use.

A published version holds the base weights, which never change, and the adapters in bf16. Workers and validators apply them
as the learner does, so all compute the same policy, and only adapters travel. Beside the versions stand:

    adapter/   the newest adapter as the package peft reads it
    model/     at the end: adapters merged into the base weights, in float32, a plain model for other software

Source: LoRA (arXiv 2106.09685).
Invariant: the learner computes with exactly what it publishes. Called by the policy and the loop.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.config.recipe import LoraSection
from shoal.files import commit_folder
from shoal.learner.ranks import Ranks
from shoal.model import numerics
from shoal.model.adapters import FIELD, Adapters, is_adapter
from shoal.model.adapters import attach_ as attach_adapters_
from shoal.model.load import WEIGHTS
from shoal.model.sources import LOCAL, resolve


def attach_(model: Any, section: LoraSection) -> None:
    """Give the model trainable adapters, and freeze everything else. Its output is unchanged at first."""
    attach_adapters_(model, Adapters(section.rank, section.alpha, section.targets), exact=numerics.of(model) == "exact")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def adapters(model: Any, ranks: Ranks) -> dict[str, Tensor]:
    """The adapters alone, on the leader's CPU, by peft's names; none on other ranks. All ranks must call it."""
    named = {name: tensor for name, tensor in model.state_dict().items() if is_adapter(name)}
    found = {name: ranks.gathered(tensor, torch.bfloat16) for name, tensor in named.items()}
    return {
        f"base_model.model.{name}.weight": of.to(named[name].dtype).contiguous()
        for name, of in found.items()
        if of is not None
    }


def save(tensors: dict[str, Tensor], section: LoraSection, base: str, folder: Path) -> None:
    """Write `adapters` as a folder that peft reads. It replaces the previous one. `base`: the model's name in the config."""
    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(resolve(base)) if base.startswith(LOCAL) else base,
        "r": section.rank,
        "lora_alpha": section.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": section.targets,
    }
    (temporary / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    commit_folder(temporary, folder)


@torch.no_grad()
def merge(version: Path, folder: Path) -> None:
    """Write a published version as a plain model, with the adapters merged in float32. `folder` must not exist yet."""
    config = json.loads((version / "config.json").read_text())
    scale = config[FIELD]["alpha"] / config[FIELD]["rank"]
    shutil.copytree(version, folder, ignore=shutil.ignore_patterns(WEIGHTS))
    merged: dict[str, Tensor] = {}
    with safe_open(version / WEIGHTS, framework="pt") as file:
        names = set(file.keys())
        for name in sorted(name for name in names if not is_adapter(name)):
            tensor = file.get_tensor(name)
            layer = name.removesuffix(".weight")
            if f"{layer}.lora_A" in names:
                down_rI, up_Or = (file.get_tensor(f"{layer}.{one}").float() for one in ("lora_A", "lora_B"))
                tensor = tensor.float() + scale * (up_Or @ down_rI)
            merged[name] = tensor
    save_file(merged, folder / WEIGHTS, metadata={"format": "pt"})
    kept = {name: value for name, value in config.items() if name != FIELD} | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(kept, indent=2) + "\n")
