"""A model as plain transformers computes it, for training on plain text: from random weights or from a folder's.

Invariant: the same folder, seed and version of PyTorch give the same random weights.
Called by `pretrain`. Left out: packing of trees and exact numerics, which `load` has.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from shoal.model.load import load_config, quiet


def plain_model(folder: Path, seed: int | None) -> Any:
    """The causal LM of `folder` in float32 on the CPU. `seed` None: with the folder's weights."""
    if seed is None:
        with quiet():
            return AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, use_safetensors=True, local_files_only=True
            ).train()
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(load_config(folder), dtype=torch.float32).train()
