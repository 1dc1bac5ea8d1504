"""The optimizers that a policy can be trained with: AdamW, or Muon for the blocks' matrices and AdamW for everything else.

Muon replaces a matrix's gradient by the nearest orthogonal matrix, about, of its momentum. That needs whole matrices. So
where they are sharded, each is gathered while its update is computed, one at a time, and every rank keeps its own rows.
Updates are scaled to the size of AdamW's, so both take one learning rate and one weight decay.

    momentum    B <- mu B + (1 - mu) G
    update      O = newton_schulz(mu B + (1 - mu) G);   W <- W (1 - lr wd) - lr 0.2 sqrt(max(rows, columns)) O

Sources: Muon (kellerjordan.github.io/posts/muon), `torch.optim.Muon`, and its scale for large models (arXiv 2502.16982).
Invariant: with whole matrices in bf16, the same bits as `torch.optim.Muon`; a sharded matrix gets its whole one's bits.
With `adamw_8bit`, `eight_bit` trains the matrices that it can.
Called by the policy. Left out: matrices of experts stacked in three dimensions (AdamW's).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.config.recipe import LearnerSection
from shoal.learner import eight_bit
from shoal.learner.ranks import whole
from shoal.model.training import local, own_rows

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: steepest at 0
ITERATIONS = 5
MOMENTUM = 0.95  # of Muon: kellerjordan.github.io/posts/muon
TINY = 1e-7


def matrices(section: LearnerSection, weights: Mapping[str, Tensor], blocks: Iterable[nn.Module]) -> frozenset[str]:
    """Names of what the section's optimizer trains. AdamW trains the rest: all, if it was chosen."""
    if section.optimizer == "adamw":
        return frozenset()
    if section.optimizer == "adamw_8bit":
        return eight_bit.matrices(weights)
    inside = {id(weight) for block in blocks for weight in block.parameters()}
    return frozenset(name for name, of in weights.items() if id(of) in inside and of.ndim == 2)


def make(
    section: LearnerSection,
    masters: Mapping[str, Tensor],
    matrices: Iterable[str],
    compute: torch.dtype,
    device: torch.device,
) -> Any:
    """The optimizer of `masters`. The section's trains those named in `matrices`; AdamW the others.

    They step where the masters are, but Muon's products are computed in `compute` on the `device`.
    """
    chosen = set(matrices)
    others = [master for name, master in masters.items() if name not in chosen]
    adamw = torch.optim.AdamW(others, lr=section.lr, betas=section.betas, weight_decay=section.weight_decay, fused=True)
    if not chosen:
        return adamw
    hidden = [master for name, master in masters.items() if name in chosen]
    if section.optimizer == "adamw_8bit":
        return Together(eight_bit.AdamW8bit(hidden, section.lr, section.betas, section.weight_decay), adamw)
    return Together(Muon(hidden, section.lr, MOMENTUM, section.weight_decay, compute, device), adamw)


def fresh(kind: str, master: Tensor) -> dict[str, Tensor]:
    """The state of a master before its first update, as this optimizer makes it."""
    if kind == "muon":
        return {"momentum_buffer": torch.zeros_like(master)}
    if kind == "adamw_8bit":
        return eight_bit.fresh(master)
    step = torch.zeros((), device=master.device)
    return {"step": step, "exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}


class Together:
    """Optimizers of different parameters, used as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        for part in parts:
            part.state = self.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


class Muon(torch.optim.Optimizer):
    """Of matrices, whole or sharded by rows."""

    def __init__(
        self,
        matrices: Iterable[Tensor],
        lr: float,
        momentum: float,
        weight_decay: float,
        compute: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.compute, self.device = compute, device

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for master in group["params"]:
                if master.grad is not None:
                    self._update(master, **{name: group[name] for name in ("lr", "momentum", "weight_decay")})

    def _update(self, master_RC: Tensor, lr: float, momentum: float, weight_decay: float) -> None:
        state = self.state[master_RC]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(master_RC)
        assert master_RC.grad is not None
        grad, buffer, master = (local(x) for x in (master_RC.grad, state["momentum_buffer"], master_RC))
        buffer.lerp_(grad, 1 - momentum)
        ahead = grad.lerp(buffer, momentum).to(self.compute).to(self.device)
        if isinstance(master_RC, DTensor):
            shard = DTensor.from_local(
                ahead,
                master_RC.device_mesh,
                master_RC.placements,
                run_check=False,
                shape=master_RC.shape,
                stride=master_RC.stride(),
            )
            update = newton_schulz(whole(shard))[own_rows(master_RC)]
        else:
            update = newton_schulz(ahead)
        master.mul_(1 - lr * weight_decay)
        master.add_(update.to(master.device), alpha=-lr * 0.2 * max(master_RC.shape) ** 0.5)


def newton_schulz(matrix_RC: Tensor) -> Tensor:
    """A matrix with the same singular vectors, whose singular values lie near 1 (0.7 to 1.2)."""
    a, b, c = COEFFICIENTS
    turned = matrix_RC.shape[0] > matrix_RC.shape[1]
    x = matrix_RC.T if turned else matrix_RC
    x = x / x.norm().clamp(min=TINY)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if turned else x
