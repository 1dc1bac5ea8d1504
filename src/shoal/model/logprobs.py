"""Logprobs and entropies of chosen tokens from hidden states, for a slice of tokens at a time.

The full logits of a batch (tokens x vocabulary) are the largest tensor in training a small model. Here they exist for a
few hundred tokens at a time and are recomputed in the backward pass, unless `keep_logits` is set. With z the logits over
the temperature, p their softmax and H its entropy:

    d logp(t) / dz = onehot(t) - p          d H / dz = -p * (log p + H)

`token_logprobs` is the one definition of a logprob: engine, validator and learner get equal bits from equal logits.
Called by all three; `chosen_logprobs` by the learner.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.model import products
from shoal.model.head import NOTHING, Change

PRODUCT_BYTES = 128 << 20  # float32 logits of one matrix product: large, for full speed
CACHED_BYTES = 4 << 20  # part of them exponentiated together: small enough for the CPU's cache


class Likelihoods(NamedTuple):
    """Likelihoods relative to the likeliest token's: of all tokens, their sum, and of the likeliest (its scaled logit)."""

    each_NV: Tensor
    total_N: Tensor
    top_N1: Tensor


def likelihoods(scaled_NV: Tensor) -> Likelihoods:
    """float32. Summed in the same order for any number of rows: PyTorch splits the sum of a single row over threads."""
    top_N1 = scaled_NV.amax(-1, keepdim=True)
    each_NV = (scaled_NV - top_N1).exp_()
    single = len(each_NV) == 1
    total_N = (each_NV.expand(2, -1).contiguous() if single else each_NV).sum(-1)[: len(each_NV)]
    return Likelihoods(each_NV, total_N, top_N1)


def token_logprobs(scaled_NV: Tensor, tokens_N: Tensor, found: Likelihoods | None = None) -> Tensor:
    """log softmax(scaled)[token], float32, nats: the one definition for engine, validator and learner."""
    scaled_NV = scaled_NV.float()
    _, total_N, top_N1 = found or likelihoods(scaled_NV)
    return (scaled_NV.gather(-1, tokens_N[:, None]) - top_N1)[:, 0] - total_N.log()


def chosen_logprobs(
    hidden_NH: Tensor,
    head_VH: Tensor,
    target_N: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    keep_logits: bool = False,
    exact: bool = False,
    bias_V: Tensor | None = None,
    change: Change = NOTHING,
) -> tuple[Tensor, Tensor | None]:
    """Logprob of each target under softmax(change(hidden @ head.T + bias) / temperature), and the entropy if requested.

    hidden_NH and head_VH are in the compute dtype, target_N is int64. Returns (logp_N, entropy_N or None), float32, in
    nats, differentiable in hidden, head and bias. `keep_logits` keeps all logits in memory, in the compute dtype, and the
    backward pass, which may run once, uses them. The results are the same. `exact`: with the bits of `products.linear`.
    """
    logp_N, entropy_N = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head_VH, target_N, temperature, with_entropy, keep_logits, exact, bias_V, change
    )
    return logp_N, entropy_N if with_entropy else None


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        head_VH: Tensor,
        target_N: Tensor,
        temperature: float,
        with_entropy: bool,
        keep_logits: bool,
        exact: bool,
        bias_V: Tensor | None,
        change: Change,
    ) -> tuple[Tensor, Tensor]:
        logsumexp_N = hidden_NH.new_empty(len(target_N), dtype=torch.float32)
        logp_N, entropy_N = torch.empty_like(logsumexp_N), torch.zeros_like(logsumexp_N)
        kept = []
        for start, z_CV in _logits(hidden_NH, head_VH, bias_V, exact):
            if keep_logits and any(ctx.needs_input_grad):
                kept.append(z_CV)
            for i, z_RV in _cached(z_CV, start, temperature, change):
                found = likelihoods(z_RV)
                logsumexp_N[i] = found.top_N1[:, 0] + found.total_N.log()
                logp_N[i] = token_logprobs(z_RV, target_N[i], found)
                if with_entropy:
                    entropy_N[i] = logsumexp_N[i] - torch.linalg.vecdot(found.each_NV, z_RV) / found.total_N
        ctx.save_for_backward(hidden_NH, head_VH, bias_V, target_N, logsumexp_N, entropy_N, *kept)
        ctx.temperature, ctx.with_entropy, ctx.exact, ctx.change = temperature, with_entropy, exact, change
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, head_VH, bias_V, target_N, logsumexp_N, entropy_N, *kept = ctx.saved_tensors
        wants_hidden, wants_head, *_, wants_bias, _ = ctx.needs_input_grad
        grad_hidden_NH = torch.empty_like(hidden_NH) if wants_hidden else None
        grad_head_VH = torch.zeros_like(head_VH, dtype=torch.float32) if wants_head else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias else None
        grad_logp_N, grad_entropy_N = (grad_N / ctx.temperature for grad_N in (grad_logp_N, grad_entropy_N))
        for start, z_CV in _in_turn(kept) if kept else _logits(hidden_NH, head_VH, bias_V, ctx.exact):
            for i, z_RV in _cached(z_CV, start, ctx.temperature, ctx.change):
                slope = None if ctx.change == NOTHING else ctx.change.slope(z_RV * ctx.temperature)
                logp_RV = z_RV.sub_(logsumexp_N[i, None])
                if ctx.with_entropy:
                    factor_RV = (logp_RV + entropy_N[i, None]).mul_(grad_entropy_N[i, None]).add_(grad_logp_N[i, None])
                    grad_RV = logp_RV.exp_().mul_(factor_RV).neg_()
                else:
                    grad_RV = logp_RV.exp_().mul_(-grad_logp_N[i, None])
                grad_RV.scatter_add_(-1, target_N[i, None], grad_logp_N[i, None])
                if slope is not None:
                    grad_RV.mul_(slope)
                z_CV[i.start - start : i.stop - start] = grad_RV  # the logits are not needed any more
            rows = slice(start, start + len(z_CV))
            if grad_hidden_NH is not None:
                torch.mm(z_CV, head_VH, out=grad_hidden_NH[rows])
            if grad_head_VH is not None:
                grad_head_VH += z_CV.T @ hidden_NH[rows]
            if grad_bias_V is not None:
                grad_bias_V += z_CV.sum(0, dtype=torch.float32)
        grad_head = None if grad_head_VH is None else grad_head_VH.to(head_VH.dtype)
        grad_bias = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_NH, grad_head, None, None, None, None, None, grad_bias, None


def _logits(hidden_NH: Tensor, head_VH: Tensor, bias_V: Tensor | None, exact: bool) -> Iterator[tuple[int, Tensor]]:
    """(first row, logits_CV in the compute dtype), one slice of rows at a time."""
    step = max(1, PRODUCT_BYTES // (4 * len(head_VH)))
    step -= step % products.FEW if step > products.FEW else 0
    head = products.linear if exact else F.linear
    for start in range(0, len(hidden_NH), step):
        yield start, head(hidden_NH[start : start + step], head_VH, bias_V)


def _in_turn(kept: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The slices that `_logits` yielded."""
    start = 0
    for z_CV in kept:
        yield start, z_CV
        start += len(z_CV)


def _cached(z_CV: Tensor, start: int, temperature: float, change: Change) -> Iterator[tuple[slice, Tensor]]:
    """(rows as a slice of all N, float32 logits over the temperature), a few rows of a product at a time."""
    step = max(1, CACHED_BYTES // (4 * z_CV.shape[1])) if z_CV.device.type == "cpu" else len(z_CV)
    for row in range(0, len(z_CV), step):
        z_RV = change(z_CV[row : row + step].to(torch.float32, copy=True))
        yield slice(start + row, start + row + len(z_RV)), z_RV if temperature == 1.0 else z_RV.div_(temperature)
