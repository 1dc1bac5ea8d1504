"""Compute logprobs and entropies of chosen tokens from hidden states, a slice of tokens at a time.

The full logits of a batch (tokens x vocabulary) are the largest tensor in training a small model. Here logits exist for
a few hundred tokens at a time. `chosen_loss` computes a slice's gradients while its logits exist, as Liger Kernel does
(arXiv 2410.10989). `chosen_logprobs`, for a loss that needs all tokens at once (gspo), recomputes the logits in the
backward pass. Let z be the logits divided by the temperature, p their softmax, and H the entropy of p. Then:

    d logp(t) / dz = onehot(t) - p          d H / dz = -p * (log p + H)

`token_logprobs` is the one definition of a logprob, so engine, validator and learner get equal bits from equal logits.
`logits` is the one definition of logits. It includes the scaling and soft-capping that some models apply after the head:

    logits = cap * tanh(scale * (hidden W^T + b) / cap)         Gemma 2, Cohere, Granite and others

Without scale and cap, logits are the head's output, unchanged. Otherwise they are float32. `support` finds scale and
cap when a model is loaded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.model import products

PRODUCT_BYTES = 128 << 20  # bytes of float32 logits from one matrix product; large products run at full speed
CACHED_BYTES = 4 << 20  # bytes of logits that are processed together; they fit the CPU's cache
ATTRIBUTE = "shoal_logits"  # a model's attribute with its LogitChange

# (a slice of the targets, their logp_C, their entropy_C or None) -> the sum of their losses
LossOf = Callable[[slice, Tensor, Tensor | None], Tensor]


class LogitChange(NamedTuple):
    """Scaling and soft-capping after the output head."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, raw_NV: Tensor) -> Tensor:
        """Apply the change. Return float32, or the input if there is no change."""
        if self == NOTHING:
            return raw_NV
        scaled_NV = raw_NV.float() * self.scale
        return scaled_NV if self.cap is None else torch.tanh(scaled_NV / self.cap) * self.cap

    def slope(self, changed_NV: Tensor) -> Tensor | float | None:
        """Return d changed / d raw from the changed logits; None if it is 1 everywhere."""
        if self.cap is not None:
            return (changed_NV / self.cap).square_().neg_().add_(1.0).mul_(self.scale)
        return None if self.scale == 1.0 else self.scale


NOTHING = LogitChange()


def change_of(model: Any) -> LogitChange:
    return getattr(model, ATTRIBUTE, NOTHING)


def logits(model: Any, hidden_NH: Tensor) -> Tensor:
    """Compute the logits of final hidden states, before the temperature. Return logits_NV."""
    return change_of(model)(model.get_output_embeddings()(hidden_NH))


class Likelihoods(NamedTuple):
    """Likelihoods relative to the likeliest token: each token's, their sum, and the likeliest token's scaled logit."""

    each_NV: Tensor
    total_N: Tensor
    top_N1: Tensor


def likelihoods(scaled_NV: Tensor) -> Likelihoods:
    """Compute likelihoods in float32. A single row is duplicated, because PyTorch sums single rows in another order."""
    top_N1 = scaled_NV.amax(-1, keepdim=True)
    each_NV = (scaled_NV - top_N1).exp_()
    single = len(each_NV) == 1
    total_N = (each_NV.expand(2, -1).contiguous() if single else each_NV).sum(-1)[: len(each_NV)]
    return Likelihoods(each_NV, total_N, top_N1)


def token_logprobs(scaled_NV: Tensor, tokens_N: Tensor, known: Likelihoods | None = None) -> Tensor:
    """Return log softmax(scaled)[token] in nats, float32. Engine, validator and learner use this one definition."""
    scaled_NV = scaled_NV.float()
    _, total_N, top_N1 = known or likelihoods(scaled_NV)
    return (scaled_NV.gather(-1, tokens_N[:, None]) - top_N1)[:, 0] - total_N.log()


@dataclass(frozen=True)
class Scoring:
    """How logprobs and entropies of targets are computed."""

    temperature: float = 1.0
    with_entropy: bool = False
    exact: bool = False  # whether `products.linear` computes the logits
    change: LogitChange = NOTHING


def chosen_logprobs(
    hidden_NH: Tensor, head_VH: Tensor, target_N: Tensor, how: Scoring = Scoring(), bias_V: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return each target's logprob under softmax(change(hidden @ head.T + bias) / temperature), and optionally the entropy.

    hidden_NH and head_VH are in the compute dtype, and target_N is int64. (logp_N, entropy_N or None) are float32, in nats,
    and differentiable in hidden, head and bias.
    """
    logp_N, entropy_N = _ChosenLogprobs.apply(hidden_NH, head_VH, bias_V, target_N, how)  # type: ignore[no-untyped-call]
    return logp_N, entropy_N if how.with_entropy else None


def chosen_loss(
    hidden_NH: Tensor,
    head_VH: Tensor,
    target_N: Tensor,
    loss_of: LossOf,
    how: Scoring = Scoring(),
    bias_V: Tensor | None = None,
) -> Tensor:
    """Return the sum of `loss_of` over slices of the targets, a scalar. The logprobs are those of `chosen_logprobs`.

    Each slice's gradients are computed while its logits exist, so logits are neither kept nor recomputed. The loss of a
    token must therefore not depend on another slice's logprobs.
    """
    if not torch.is_grad_enabled():  # an autograd Function does not see this setting, and would compute gradients
        hidden_NH, head_VH = hidden_NH.detach(), head_VH.detach()
        bias_V = None if bias_V is None else bias_V.detach()
    loss: Tensor = _ChosenLoss.apply(hidden_NH, head_VH, bias_V, target_N, how, loss_of)  # type: ignore[no-untyped-call]
    return loss


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        head_VH: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        how: Scoring,
    ) -> tuple[Tensor, Tensor]:
        scores = _Scores.empty(target_N, how)
        for start, z_CV in _logits(hidden_NH, head_VH, bias_V, how.exact):
            scores.read(start, z_CV)
        ctx.save_for_backward(hidden_NH, head_VH, bias_V, target_N, scores.logp_N, scores.logsumexp_N, scores.entropy_N)
        ctx.how = how
        return scores.logp_N, scores.entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, head_VH, bias_V, target_N, logp_N, logsumexp_N, entropy_N = ctx.saved_tensors
        scores = _Scores(target_N, ctx.how, logp_N, logsumexp_N, entropy_N)
        gradients = _Gradients(hidden_NH, head_VH, bias_V, ctx.needs_input_grad)
        for start, z_CV in _logits(hidden_NH, head_VH, bias_V, ctx.how.exact):
            rows = slice(start, start + len(z_CV))
            scores.differentiate_(start, z_CV, grad_logp_N[rows], grad_entropy_N[rows])
            gradients.add(rows, z_CV)
        return (*gradients.take(), None, None)


class _ChosenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        head_VH: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        how: Scoring,
        loss_of: LossOf,
    ) -> Tensor:
        scores = _Scores.empty(target_N, how)
        wanted = any(ctx.needs_input_grad)
        gradients = _Gradients(hidden_NH, head_VH, bias_V, ctx.needs_input_grad)
        total = hidden_NH.new_zeros((), dtype=torch.float32)
        for start, z_CV in _logits(hidden_NH, head_VH, bias_V, how.exact):
            scores.read(start, z_CV)
            rows = slice(start, start + len(z_CV))
            with torch.set_grad_enabled(wanted):
                logp_C = scores.logp_N[rows].detach().requires_grad_(wanted)
                entropy_C = scores.entropy_N[rows].detach().requires_grad_(wanted)
                loss = loss_of(rows, logp_C, entropy_C if how.with_entropy else None)
            total += loss.detach()
            if wanted:
                slopes = torch.autograd.grad(loss, (logp_C, entropy_C), materialize_grads=True)
                scores.differentiate_(start, z_CV, *slopes)
                gradients.add(rows, z_CV)
        ctx.save_for_backward(*gradients.take())
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plain = float(grad) == 1.0
        return (*(g if g is None or plain else g * grad for g in ctx.saved_tensors), None, None, None)


@dataclass(frozen=True)
class _Scores:
    """Logprob, log-sum-exp and entropy of each target, filled slice by slice."""

    target_N: Tensor
    how: Scoring
    logp_N: Tensor
    logsumexp_N: Tensor
    entropy_N: Tensor  # 0 unless requested

    @staticmethod
    def empty(target_N: Tensor, how: Scoring) -> "_Scores":
        logp_N = torch.empty(len(target_N), device=target_N.device, dtype=torch.float32)
        return _Scores(target_N, how, logp_N, torch.empty_like(logp_N), torch.zeros_like(logp_N))

    def read(self, start: int, z_CV: Tensor) -> None:
        """Fill the scores of the targets from index `start` on, from their logits."""
        for i, z_RV in _cached(z_CV, start, self.how):
            relative = likelihoods(z_RV)
            self.logsumexp_N[i] = relative.top_N1[:, 0] + relative.total_N.log()
            self.logp_N[i] = token_logprobs(z_RV, self.target_N[i], relative)
            if self.how.with_entropy:
                self.entropy_N[i] = self.logsumexp_N[i] - torch.linalg.vecdot(relative.each_NV, z_RV) / relative.total_N

    def differentiate_(self, start: int, z_CV: Tensor, grad_logp_C: Tensor, grad_entropy_C: Tensor) -> None:
        """Replace these targets' logits by the gradients with respect to those logits."""
        how = self.how
        grad_logp_C, grad_entropy_C = (grad_C / how.temperature for grad_C in (grad_logp_C, grad_entropy_C))
        for i, z_RV in _cached(z_CV, start, how, in_place=True):
            here = slice(i.start - start, i.stop - start)
            grad_logp_R1, grad_entropy_R1 = grad_logp_C[here, None], grad_entropy_C[here, None]
            slope = None if how.change == NOTHING else how.change.slope(z_RV * how.temperature)
            logp_RV = z_RV.sub_(self.logsumexp_N[i, None])
            if how.with_entropy:
                factor_RV = (logp_RV + self.entropy_N[i, None]).mul_(grad_entropy_R1).add_(grad_logp_R1)
                grad_RV = logp_RV.exp_().mul_(factor_RV).neg_()
            else:
                grad_RV = logp_RV.exp_().mul_(-grad_logp_R1)
            grad_RV.scatter_add_(-1, self.target_N[i, None], grad_logp_R1)
            if slope is not None:
                grad_RV.mul_(slope)
            if z_CV.dtype is not torch.float32 or how.change != NOTHING:
                z_CV[here] = grad_RV


class _Gradients:
    """Accumulate the requested gradients of hidden, head and bias, in float32."""

    def __init__(self, hidden_NH: Tensor, head_VH: Tensor, bias_V: Tensor | None, wanted: Sequence[bool]) -> None:
        self.inputs = (hidden_NH, head_VH, bias_V)
        wants_hidden, wants_head, wants_bias, *_ = wanted
        self.hidden_NH = torch.empty_like(hidden_NH) if wants_hidden else None
        self.head_VH: Tensor | None = None  # None until the first slice is added
        self.wants_head = wants_head
        self.bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias and bias_V is not None else None

    def add(self, rows: slice, grad_CV: Tensor) -> None:
        """Add a slice's gradients, from the gradients with respect to its logits."""
        hidden_NH, head_VH, _ = self.inputs
        if self.hidden_NH is not None:
            torch.mm(grad_CV, head_VH, out=self.hidden_NH[rows])
        if self.wants_head and self.head_VH is None:
            self.head_VH = (grad_CV.T @ hidden_NH[rows]).float()
        elif self.head_VH is not None and grad_CV.dtype is torch.float32:
            self.head_VH.addmm_(grad_CV.T, hidden_NH[rows])
        elif self.head_VH is not None:
            self.head_VH += grad_CV.T @ hidden_NH[rows]
        if self.bias_V is not None:
            self.bias_V += grad_CV.sum(0, dtype=torch.float32)

    def take(self) -> list[Tensor | None]:
        """Return the gradients in the inputs' dtypes."""
        if self.wants_head and self.head_VH is None:  # there are no targets
            self.head_VH = torch.zeros_like(self.inputs[1])
        sums = (self.hidden_NH, self.head_VH, self.bias_V)
        return [None if g is None or x is None else g.to(x.dtype) for g, x in zip(sums, self.inputs, strict=True)]


def _logits(hidden_NH: Tensor, head_VH: Tensor, bias_V: Tensor | None, exact: bool) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, logits_CV in the compute dtype), one slice of rows at a time."""
    step = max(1, PRODUCT_BYTES // (4 * len(head_VH)))
    step -= step % products.FEW if step > products.FEW else 0
    head = products.linear if exact else F.linear
    for start in range(0, len(hidden_NH), step):
        yield start, head(hidden_NH[start : start + step], head_VH, bias_V)


def _cached(z_CV: Tensor, start: int, how: Scoring, *, in_place: bool = False) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice of all N rows, float32 logits divided by the temperature), a few rows at a time.

    With `in_place`, float32 logits without a change after the head are divided where they are, not in a copy.
    """
    step = max(1, CACHED_BYTES // (4 * z_CV.shape[1])) if z_CV.device.type == "cpu" else len(z_CV)
    for row in range(0, len(z_CV), step):
        z_RV = how.change(z_CV[row : row + step].to(torch.float32))
        if how.temperature != 1.0:
            z_RV = torch.div(z_RV, how.temperature, out=z_RV if in_place else None)
        yield slice(start + row, start + row + len(z_RV)), z_RV
