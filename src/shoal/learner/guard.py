"""Decides whether an update may be made, from the loss and gradient norm of the whole batch, before any weight changes.

Invariant: a loss or norm that is not finite never reaches the weights, whatever the settings. Pure: the caller counts the
skips. Called by `policy` before each optimizer step.
Left out: spikes relative to a running mean (a moving bound hides a slow divergence), and rolling back to a checkpoint.
Gradient clipping handles large gradients; a bound far above `learner.grad_clip` catches broken batches. PaLM skips batches
where training diverges by hand (arXiv 2204.02311, section 5.1).
"""

import math
from dataclasses import dataclass
from typing import Literal

from shoal.config.recipe import GuardSection

MAX_SKIPS = 3  # updates, or steps, skipped in a row; one more stops the run


@dataclass(frozen=True)
class Decision:
    action: Literal["update", "skip", "stop"]
    why: str = ""  # for a person; empty for "update"


def judge(update: int, loss: float, grad_norm: float, settings: GuardSection, *, skipped_in_row: int) -> Decision:
    """What to do with optimizer update `update` (from 0), given its loss and its gradient norm before clipping.

    `skipped_in_row`: how many updates directly before this one were skipped.
    """
    wrong = _wrong(loss, grad_norm, settings.max_grad_norm)
    if not wrong:
        return Decision("update")
    why = f"update {update}: {wrong}"
    if settings.action == "stop":
        return Decision("stop", f"{why}; nothing was updated: lower learner.lr")
    if skipped_in_row >= MAX_SKIPS:
        return Decision(
            "stop",
            f"{why}; the {skipped_in_row} updates before it were skipped, as many as may be: lower learner.lr",
        )
    return Decision("skip", f"{why}; skipped, {skipped_in_row + 1} in a row of at most {MAX_SKIPS}")


def _wrong(loss: float, grad_norm: float, max_grad_norm: float | None) -> str:
    for name, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            return f"the {name} is {value}, not a finite number"
    if max_grad_norm is not None and grad_norm > max_grad_norm:
        return f"the gradient norm {grad_norm:.4g} exceeds learner.guard.max_grad_norm = {max_grad_norm:g}"
    return ""
