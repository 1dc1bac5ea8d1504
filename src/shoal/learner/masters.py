"""The trained weights: fp32 masters, and the model's own weights, which are the masters rounded to bf16.

The optimizer updates the masters. The learner publishes the rounded weights and computes with them, as the workers do.
With several ranks and bf16 compute, FSDP's fp32 shards are the masters themselves. FSDP casts them to bf16 when it
gathers them.
With `learner.lora` (LoRA, arXiv 2106.09685; `model/adapters`), low-rank adapters are trained instead of the weights. A
published version holds the base weights, which never change, and the adapters in bf16. Workers and validators apply the
adapters as the learner does, so all compute the same policy. Only adapters are transferred. After the last step the
adapters are merged into the base weights, and also written for peft.
Invariant: the learner computes with exactly the weights that it publishes. If a weight is its own master, no function
here changes it.
"""

import json
import logging
import shutil
from collections.abc import Container, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.config.recipe import LoraSection
from shoal.learner.ranks import Ranks
from shoal.model import numerics as numerics_module
from shoal.model.adapters import FIELD, Adapters, attach_, is_adapter
from shoal.model.load import WEIGHTS
from shoal.model.numerics import Numerics
from shoal.model.sources import LOCAL, resolve
from shoal.model.training import Scorer, Sharded, open_sharded

Tensors = Mapping[str, Tensor]

CONFIG = "config.json"
ROUNDING = (1e-5, 1e-7)  # relative and absolute: by how much two machines' merges of the same adapters may differ

log = logging.getLogger(__name__)


def in_shards(folder: Path, device: str, numerics: Numerics, ranks: Ranks) -> Sharded | None:
    """Return a sharded loader, or None if there is one rank or every rank must load the whole model."""
    if ranks.size == 1:
        return None
    result = open_sharded(folder, device, numerics, ranks.shard)
    if isinstance(result, Sharded):
        return result
    log.warning("%s is loaded whole on every rank before it is sharded: %s", folder, result)
    return None


def prepare(
    scorer: Scorer, ranks: Ranks, sharded: Sharded | None, compute: torch.dtype, stored: Container[str]
) -> dict[str, Tensor]:
    """Shard the model, copy its trained weights as masters, and round the model to bf16 values in the compute dtype.

    Frozen weights stay in bf16. `stored` names the tensors in a published version. Return the masters by name.
    """
    shards = ranks.size > 1
    for parameter in scorer.model.parameters() if shards else ():
        if not parameter.requires_grad:
            parameter.data = parameter.detach().bfloat16()
    ranks.shard(scorer, compute)
    if sharded:
        sharded.fill_(scorer)
    masters = {}
    for name, buffer in scorer.model.named_buffers():
        if name in stored and buffer.is_floating_point():  # published, but not trained
            buffer.copy_(buffer.bfloat16())
    for name, parameter in scorer.model.named_parameters():
        if shards and parameter.requires_grad and compute is torch.bfloat16:
            masters[name] = parameter
            continue
        exact = parameter.detach()
        rounded = exact.bfloat16()
        if shards:
            exact = exact.clone()
            parameter.detach().copy_(rounded)
        else:
            parameter.data = rounded.to(compute)
        if parameter.requires_grad:
            masters[name] = exact.requires_grad_()
    return masters


@torch.no_grad()
def round_(weights: Tensors, masters: Tensors) -> None:
    """Set the weights to the masters, rounded to bf16."""
    for name, weight in weights.items():
        if masters[name] is not weight:
            weight.copy_(masters[name] if weight.dtype is torch.bfloat16 else masters[name].bfloat16())


def collect(weights: Tensors, masters: Tensors) -> None:
    """Move the weights' gradients to the masters, in fp32."""
    for name, weight in weights.items():
        if weight.grad is not None and masters[name] is not weight:
            _add(masters[name], weight)


def collect_early(weights: Tensors, masters: Tensors) -> None:
    """Move each weight's gradient to its master when the backward pass completes that gradient, to save memory."""
    for name, weight in weights.items():
        if masters[name] is not weight:
            weight.register_post_accumulate_grad_hook(partial(_add, masters[name]))  # type: ignore[no-untyped-call]


def _add(master: Tensor, weight: Tensor) -> None:
    assert weight.grad is not None
    grad = weight.grad.float()
    master.grad = grad if master.grad is None else master.grad.add_(grad)
    weight.grad = None


# --- low-rank adapters ---------------------------------------------------------------------------------------------------


def attach_adapters_(model: Any, section: LoraSection) -> None:
    """Add trainable adapters to the model and freeze everything else. The model's output does not change yet."""
    attach_(model, Adapters(section.rank, section.alpha), exact=numerics_module.of(model) == "exact")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def merge_adapters(version: Path, folder: Path) -> None:
    """Write a published version as a plain model, with the adapters merged in float32. `folder` must not exist yet."""
    shutil.copytree(version, folder, ignore=shutil.ignore_patterns(WEIGHTS))
    save_file(dict(_merged(version)), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(_plain_config(version))


def difference_from_merge(version: Path, folder: Path) -> str:
    """Return the first file or tensor in `folder` that differs from what `merge_adapters` writes, or "".

    Tensors may differ by ROUNDING.
    """
    if names := {path.name for path in version.iterdir()} ^ {path.name for path in folder.iterdir()}:
        return min(names)
    for path in sorted(path for path in version.iterdir() if path.name != WEIGHTS):
        wanted = _plain_config(version).encode() if path.name == CONFIG else path.read_bytes()
        if (folder / path.name).read_bytes() != wanted:
            return path.name
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        names = set(file.keys())
        for name, merged in _merged(version):
            if name not in names:
                return name
            tensor = file.get_tensor(name)
            if (tensor.shape, tensor.dtype) != (merged.shape, merged.dtype) or not tensor.allclose(merged, *ROUNDING):
                return name
            names.remove(name)
    return min(names, default="")


@torch.no_grad()
def _merged(version: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a plain model: the base weights, and those with adapters merged in float32."""
    section = _config(version)[FIELD]
    scale = section["alpha"] / section["rank"]
    with safe_open(version / WEIGHTS, framework="pt") as file:
        names = set(file.keys())
        for name in sorted(name for name in names if not is_adapter(name)):
            tensor = file.get_tensor(name)
            layer = name.removesuffix(".weight")
            if f"{layer}.lora_A" in names:
                down_rI, up_Or = (file.get_tensor(f"{layer}.{side}").float() for side in ("lora_A", "lora_B"))
                tensor = tensor.float() + scale * (up_Or @ down_rI)
            yield name, tensor


def _config(version: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((version / CONFIG).read_text())
    return config


def _plain_config(version: Path) -> str:
    kept = {name: value for name, value in _config(version).items() if name != FIELD} | {"dtype": "float32"}
    return json.dumps(kept, indent=2) + "\n"


def write_adapter(version: Path, folder: Path, base: str) -> None:
    """Write a published version's adapters in peft's format. `base` is the config's `model.name`."""
    section = _config(version)[FIELD]
    folder.mkdir(parents=True)
    with safe_open(version / WEIGHTS, framework="pt") as file:
        adapters = {name: file.get_tensor(name) for name in file.keys() if is_adapter(name)}  # noqa: SIM118
    tensors = {f"base_model.model.{name}.weight": tensor for name, tensor in adapters.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(resolve(base)) if base.startswith(LOCAL) else base,
        "r": section["rank"],
        "lora_alpha": section["alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": section["targets"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
