"""RMS norms with a backward of their own: the same bits forward, fewer passes over memory backward, and less to keep.

    r = rsqrt(mean(x^2) + eps)     n = x r     y = w n        dx = r (w dy - n mean(w dy n))     dw = sum(dy n)

Autograd keeps x in float32 and n for transformers' norms, and walks over them op by op. Here x is kept as it came, and r.
Invariant: a norm is replaced only if its output on a probe, in float32 and in bf16, is this one's bit for bit.
Called by the policy. Source of the formula: RMSNorm (arXiv 1910.07467).
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

PROBES = (torch.float32, torch.bfloat16)
ROWS = 8  # of the probe


class RMSNorm(nn.Module):
    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        y: Tensor = _RMSNorm.apply(hidden_states, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        exact = x.to(torch.float32)
        r = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight_H, r)
        return weight_H * (exact * r).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_H, r = ctx.saved_tensors
        n = x * r  # float32
        product = grad * n
        wants_x, wants_weight, _ = ctx.needs_input_grad
        grad_H = product.flatten(0, -2).sum(0).to(weight_H.dtype) if wants_weight else None
        if not wants_x:
            return None, grad_H, None
        mean = torch.linalg.vecdot(product, weight_H.to(torch.float32)).div_(x.shape[-1])
        found = torch.mul(grad, weight_H, out=product) if grad.dtype is torch.float32 else (grad * weight_H).float()
        found.sub_(n.mul_(mean[..., None])).mul_(r)
        return found.to(x.dtype), grad_H, None


def replace_(model: Any) -> None:
    """Replace every norm of this kind, sharing its weight."""
    alike: dict[type, bool] = {}
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            eps = getattr(layer, "variance_epsilon", getattr(layer, "eps", None))
            if not type(layer).__name__.endswith("RMSNorm") or not isinstance(eps, float):
                continue
            if [of for of, _ in layer.named_parameters()] != ["weight"]:
                continue
            if type(layer) not in alike:
                alike[type(layer)] = _same(layer, eps)
            if alike[type(layer)]:
                setattr(parent, name, RMSNorm(layer.weight, eps).train(layer.training))


@torch.no_grad()
def _same(layer: Any, eps: float) -> bool:
    draw = torch.Generator().manual_seed(0)
    for dtype in PROBES:
        own = copy.deepcopy(layer).to_empty(device="cpu").to(dtype)
        own.weight.copy_(torch.randn(own.weight.shape, generator=draw))
        x = torch.randn(1, ROWS, len(own.weight), generator=draw).to(dtype)
        if not torch.equal(own(x), RMSNorm(own.weight, eps)(x)):
            return False
    return True
