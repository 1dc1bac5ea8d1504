"""Norms with a backward of their own: transformers' bits forward, autograd's gradients backward."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from shoal.model import norms

SIZE = 24


@pytest.mark.parametrize(
    ("kind", "replaced"), [(LlamaRMSNorm, True), (GemmaRMSNorm, False), (Olmo2RMSNorm, False), (nn.LayerNorm, False)]
)
def test_only_norms_with_the_same_bits_are_replaced(kind: type, replaced: bool) -> None:
    """Gemma's adds 1 to the weight, OLMo 2's multiplies before it rounds."""
    parent = nn.Sequential(kind(SIZE, eps=1e-5))
    weight = parent[0].weight
    norms.replace_(parent)
    assert isinstance(parent[0], norms.RMSNorm) == replaced
    assert parent[0].weight is weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_the_same_bits_and_gradients_those_of_autograd(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain: Any = LlamaRMSNorm(SIZE, eps=1e-5).to(dtype)
    plain.weight.data.normal_()
    parent = nn.Sequential(copy.deepcopy(plain))
    norms.replace_(parent)
    x = torch.randn(2, 5, SIZE).to(dtype)
    grad = torch.randn(2, 5, SIZE).to(dtype)
    found = []
    for norm in (plain, parent[0]):
        mine = x.clone().requires_grad_()
        y = norm(mine)
        found.append([y, *torch.autograd.grad(y, (mine, norm.weight), grad)])
    (y, *gradients), (expected, *others) = found
    assert torch.equal(y, expected)
    for one, other in zip(gradients, others, strict=True):
        assert one.dtype is other.dtype is dtype
        torch.testing.assert_close(one, other, atol=0.05 if dtype is torch.bfloat16 else 1e-5, rtol=0.02)
