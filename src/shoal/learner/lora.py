"""Low-rank adapters in place of whole weights, through the `peft` package (`pip install 'shoal[lora]'`).

The published version is merged, W + scale * B A, so workers and validators need no change. The adapter is also saved
alone. The learner computes W x + scale * B (A x), which rounds differently, so its logprobs differ from those of the
merged bf16 weights. `learner.behaviour_logprobs = "recomputed"` removes that difference from the ratio.
Source: LoRA (arXiv 2106.09685).
Invariant: published tensors have the names of the base model.
Called by the policy. Left out: adapters of the embeddings and the output head.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.config.recipe import LoraSection
from shoal.errors import ShoalError
from shoal.learner.ranks import whole


class MissingPeftError(ShoalError):
    """The package peft is not installed. The message says how to install it."""


def attach(model: Any, section: LoraSection) -> Any:
    """`model` with trainable adapters and everything else frozen. Its output is unchanged at first."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingPeftError("learner.lora needs the package peft: pip install 'shoal[lora]'") from error
    return get_peft_model(model, LoraConfig(**_settings(section))).base_model.model


class Merged(Mapping[str, Tensor]):
    """The base model's weights by name. A weight with an adapter is merged on access, in float32."""

    def __init__(self, model: Any) -> None:
        self.tensors = {name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items()}
        self.scale = {name: m.scaling["default"] for name, m in model.named_modules() if hasattr(m, "lora_A")}

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        layer = name.removesuffix(".weight")
        if layer not in self.scale:
            tensor: Tensor = self.tensors[name]
            return tensor
        down, up = (whole(self.tensors[f"{layer}.lora_{which}.default.weight"]).float() for which in "AB")
        delta: Tensor = self.scale[layer] * (up @ down)
        return whole(self.tensors[name]).float() + delta

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.tensors if ".lora_" not in name)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def adapters(model: Any) -> dict[str, Tensor]:
    """The adapters alone, on the CPU, by peft's names. All ranks must call it."""
    return {
        f"base_model.model.{name.replace('.default.', '.')}": whole(tensor.detach()).cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if ".lora_" in name
    }


def save(tensors: dict[str, Tensor], section: LoraSection, folder: Path) -> None:
    """Write `adapters` as a folder that peft reads. It replaces the previous one."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
    LoraConfig(**_settings(section)).save_pretrained(str(temporary))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def _settings(section: LoraSection) -> dict[str, Any]:
    return {
        "r": section.rank,
        "lora_alpha": section.alpha,
        "target_modules": section.targets,
        "lora_dropout": 0.0,
        "task_type": "CAUSAL_LM",
    }
