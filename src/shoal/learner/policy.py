"""The policy being trained: a model, its optimizer and learning rate, and one update.

Master weights and optimizer state are fp32. Between updates the model holds the masters rounded to bf16, which is what is
published, and `remainders` holds what rounding took off. So gradients are taken at exactly the weights that workers
sample with, in whatever dtype this machine computes: at RL learning rates an update is smaller than a bf16 step, and a
learner that looked at its masters would see a policy that nobody samples from.
Called by the learner's loop and by supervised warm-up (`sft`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.learner.batch import MicroBatch
from shoal.learner.loss import policy_loss
from shoal.model.dtype import DtypeName
from shoal.model.load import load_model, load_tokenizer
from shoal.model.logprobs import chosen_logprobs
from shoal.model.tree import Pack, forward_hidden
from shoal.recipe import LearnerSection


class DivergedError(Exception):
    """A loss or gradient that is no number; nothing was updated."""


class Policy:
    def __init__(self, folder: Path, config: LearnerSection, dtype: DtypeName, device: str, temperature: float) -> None:
        self.config = config
        self.device = device
        self.compute = getattr(torch, dtype)
        self.temperature = temperature
        self.model = load_model(folder, "float32", device)
        self.tokenizer = load_tokenizer(folder)
        self.reference: Any = load_model(folder, dtype, device) if config.loss.beta > 0 else None
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self.remainders = [torch.zeros_like(p, dtype=torch.int16) for p in self.model.parameters()]
        self.updates = 0  # optimizer steps so far

    def update(self, micro_batches: Iterable[MicroBatch], n_tokens: int) -> dict[str, float]:
        """One optimizer step on a batch of `n_tokens` trained tokens. Returns sums and norms to report."""
        sums: dict[str, float] = {}

        def loss(micro: MicroBatch) -> Tensor:
            value, told = self._loss(micro, n_tokens)
            for name, amount in told.items():
                sums[name] = sums.get(name, 0.0) + amount
            return value

        return sums | self.step(loss, micro_batches)

    def step(self, loss: Callable[[Any], Tensor], batches: Iterable[Any]) -> dict[str, float]:
        """Accumulate the gradients of `loss` over `batches`, clip, update. Raises DivergedError before any change."""
        total = 0.0
        for batch in batches:
            value = loss(batch)
            value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip))
        if not torch.isfinite(torch.tensor([total, norm])).all():
            self.optimizer.zero_grad(set_to_none=True)
            raise DivergedError(f"update {self.updates}: loss {total}, gradient norm {norm}; lower learner.lr")
        lr = self.config.lr * min(1.0, (self.updates + 1) / max(1, self.config.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self.masters():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # now, so that no gradients lie in memory while waiting
        self.updates += 1
        return {"loss": total, "optim/grad_norm": norm, "optim/lr": lr}

    @contextmanager
    def masters(self) -> Iterator[None]:
        """The model's parameters are the fp32 masters in here, and are rounded again after."""
        with torch.no_grad():
            for parameter, remainder in zip(self.model.parameters(), self.remainders, strict=True):
                parameter.view(torch.int32).add_(remainder)
            try:
                yield
            finally:
                for parameter, remainder in zip(self.model.parameters(), self.remainders, strict=True):
                    remainder.copy_(round_to_bf16_(parameter))

    def logprobs(self, packed: Pack, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """The policy's logprobs of the pack's completion tokens, with gradient, and their entropies where asked for."""
        return self._logprobs(self.model, packed.to(torch.device(self.device)), with_entropy)

    def _logprobs(self, model: Any, packed: Pack, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=self.compute == torch.bfloat16):
            hidden_NH = forward_hidden(model, packed)
            return chosen_logprobs(
                model, hidden_NH, packed.target_N, temperature=self.temperature, with_entropy=with_entropy
            )

    def _loss(self, micro: MicroBatch, n_tokens: int) -> tuple[Tensor, dict[str, float]]:
        settings = self.config.loss
        packed = micro.pack.to(torch.device(self.device))
        logp_N, entropy_N = self._logprobs(self.model, packed, settings.entropy > 0)
        reference_N = None
        if self.reference is not None:
            with torch.no_grad():
                reference_N, _ = self._logprobs(self.reference, packed, False)
        terms = policy_loss(
            logp_N,
            micro.behaviour_N.to(self.device),
            micro.advantage_N.to(self.device),
            denominator=n_tokens,
            epsilon=settings.epsilon,
            delta=settings.delta,
            beta=settings.beta,
            reference_N=reference_N,
            entropy_coef=settings.entropy,
            entropy_N=entropy_N,
        )
        return terms.loss, {
            "policy/clip_low": terms.clip_low,
            "policy/clip_high": terms.clip_high,
            "policy/clip_delta": terms.clip_delta,
            "policy/mismatch_kl": terms.mismatch_kl,
            "policy/entropy": terms.entropy,
            "policy/kl": terms.kl,
        }


def round_to_bf16_(weight: Tensor) -> Tensor:
    """Round float32 to the nearest bfloat16 in place, halves away from zero. Returns what it took off, as int16.

    It is counted in the last places of float32: adding it to the bits gives the old values back, exactly.
    """
    bits = weight.view(torch.int32)
    rounded = bits.add(1 << 15).bitwise_and_(-1 << 16)
    remainder = (bits - rounded).to(torch.int16)
    bits.copy_(rounded)
    return remainder
