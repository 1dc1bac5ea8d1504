"""AdamW whose moments are kept in 8 bits: 2 bytes of state an entry in place of 8, by the package bitsandbytes.

A moment is a code of 8 bits for each entry, and a float32 scale for each block of 256 entries of a row. Blocks end with
their rows, so matrices whose rows are no multiple of 256 are AdamW's. A rank that holds some rows of a matrix computes them
as if it held all of them: sharding changes no bit, and a checkpoint can be read by any number of ranks.

    m, v    decoded;   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g g
    W       <- W (1 - lr wd) - lr m / (1 - b1^t) / (sqrt(v) / sqrt(1 - b2^t) + eps);   m, v encoded

Source: 8-bit optimizers by block-wise quantisation (arXiv 2110.02861). Invariant: masters stay float32.
Called by `optimizers`. bitsandbytes is the extra `8bit`; it computes on CPUs and on CUDA devices.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.model.training import local

BLOCK = 256  # entries; bitsandbytes knows no other size here
EPSILON = 1e-8


class EightBitError(ShoalError):
    """bitsandbytes is not installed."""


def matrices(weights: Mapping[str, Tensor]) -> frozenset[str]:
    """Those of which a row is whole blocks."""
    return frozenset(name for name, of in weights.items() if of.ndim == 2 and of.shape[1] % BLOCK == 0)


def fresh(master: Tensor) -> dict[str, Tensor]:
    """The state before the first update, sharded as the master is. Codes say nothing while their scale is 0."""
    of = master.detach()
    state: dict[str, Tensor] = {"step": torch.zeros((), device=of.device)}
    for moment in ("exp_avg", "exp_avg_sq"):
        state[moment] = torch.zeros_like(of, dtype=torch.uint8)
        state[f"{moment}_scale"] = torch.zeros_like(of[:, : of.shape[1] // BLOCK])
    return state


class AdamW8bit(torch.optim.Optimizer):
    def __init__(self, matrices: Iterable[Tensor], lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        """Raises EightBitError without bitsandbytes."""
        super().__init__(matrices, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        try:
            from bitsandbytes import functional
        except ImportError as error:
            raise EightBitError(
                'learner.optimizer = "adamw_8bit" needs bitsandbytes: pip install "shoal[8bit]"'
            ) from error
        self._functional: Any = functional
        device = self.param_groups[0]["params"][0].device
        self._maps = [functional.create_dynamic_map(signed=signed).to(device) for signed in (True, False)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for master in group["params"]:
                if master.grad is not None:
                    self._update(master, group["lr"], group["betas"], group["weight_decay"])

    def _update(self, master: Tensor, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        state = self.state[master]
        if not state:
            state.update(fresh(master))
        state["step"] += 1
        assert master.grad is not None
        moments = ("exp_avg", "exp_avg_sq")
        own, grad, *codes = (local(x) for x in (master.detach(), master.grad, *(state[name] for name in moments)))
        if not own.numel():  # a rank may hold no row
            return
        self._functional.optimizer_update_8bit_blockwise(
            "adam",
            grad.contiguous(),
            own,
            *codes,
            *betas,
            0.0,  # of optimizers with a third moment, like the next
            0.0,
            EPSILON,
            int(state["step"]),
            lr,
            *self._maps,
            *(local(state[f"{name}_scale"]).view(-1) for name in moments),
            weight_decay,
        )
