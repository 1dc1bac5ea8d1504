"""Tests of exact numerics use these small random models of many architectures, and functions that run packed sequences."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from shoal.model.dtype import DtypeName
from shoal.model.load import load_model
from shoal.model.logprobs import token_logprobs
from shoal.model.numerics import refusal
from shoal.model.tree import Tree, forward_hidden, pack

SIZE: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.15},
    **{"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
}
DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16")
NINE = {"num_attention_heads": 9, "num_key_value_heads": 3}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped heads": ("llama", {}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "one query head per key head": ("llama", {"num_key_value_heads": 4}),
    "three query heads per key head": ("llama", {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16}),
    "heads of 24": ("llama", {"head_dim": 24}),
    "heads of 80": ("llama", {"head_dim": 80}),
    "heads of 10": ("llama", {"head_dim": 10}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "untied head": ("llama", {"tie_word_embeddings": False}),
    "odd vocabulary": ("llama", {"vocab_size": 101, "intermediate_size": 100}),
    "wide": ("llama", {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 1} | NINE),
    "biases of queries and keys": ("qwen2", {}),
    "norms of queries and keys": ("qwen3", {"head_dim": 16}),
    "norms of whole queries and keys": ("olmo2", {}),
}  # fmt: skip


QUICK = ("grouped heads", "wide", "norms of queries and keys")
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ARCHITECTURES]
NEEDS_EXACT = pytest.mark.skipif(bool(refusal("float32")), reason=f"not exact on this machine: {refusal('float32')}")


def skip_unless_exact(dtype: DtypeName) -> None:
    if why := refusal(dtype):
        pytest.skip(f"not exact on this machine: {why}")


def make(architecture: str, folder: Path, seed: int = 0) -> Path:
    """Save a model with random weights, biases and norms in a folder."""
    kind, changed = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZE | changed)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
            weight.copy_(weight.bfloat16())
            assert weight.abs().max() > 0, name
    model.save_pretrained(folder)
    return folder


def exact_model(architecture: str, folder: Path, dtype: DtypeName) -> Any:
    skip_unless_exact(dtype)
    return load_model(make(architecture, folder), dtype, numerics="exact")


@torch.inference_mode()
def states(model: Any, trees: Sequence[Tree], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return (hidden_NH, logp_N) of the trees' completions, packed into one row, as the validator computes them."""
    packed = pack(trees)
    hidden_NH = forward_hidden(model, packed)
    return hidden_NH, token_logprobs(model.lm_head(hidden_NH).float().div_(temperature), packed.target_N)


def random_trees(seed: int, vocabulary: int, longest: int = 200) -> list[Tree]:
    draw = torch.Generator().manual_seed(seed)

    def tokens(limit: int) -> list[int]:
        return torch.randint(vocabulary, (int(torch.randint(1, limit, (), generator=draw)),), generator=draw).tolist()

    counts = torch.randint(1, 5, (4,), generator=draw).tolist()
    return [Tree(tokens(longest), [tokens(60) for _ in range(count)]) for count in counts]
