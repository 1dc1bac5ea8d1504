"""The outer step of DiLoCo as pure functions: what one site's training is worth, and what all do with the average.

    pseudo-gradient   d_i = θ − θ_i                      DiLoCo (arXiv 2311.08105), algorithm 1, line 11
    average           d   = 1/n Σ d_i                    line 12
    velocity          v'  = μ·v + d                      SGD with Nesterov momentum as in Sutskever et al. 2013,
    parameters        θ'  = θ − η·(d + μ·v')             in the form of torch.optim.SGD(nesterov=True)
    delayed           θ_i ← α·θ_i + (1 − α)·θ'           Streaming DiLoCo (arXiv 2501.18512), algorithm 2

θ are the parameters that all sites agree on, θ_i those of site i after its inner steps. The papers use η = 0.7, μ = 0.9.

Invariant: equal arguments give equal bits on every machine. Each line is one product or one sum in float64, which IEEE 754
rounds in one way only, and each result is rounded to float32 once. No sum runs over elements, so vectors are computed CHUNK
numbers at a time: float64 copies of a whole model would be most of a site's memory.
Called by `site` and `meeting`. All tensors are vectors of equal length on the CPU.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK = 1 << 20  # numbers; a multiple of every block of `codec`


def pseudo_gradient(agreed: Tensor, local: Tensor) -> Tensor:
    """θ − θ_i in float64, where the difference of two float32 is exact unless one is 2^29 times the other."""
    return agreed.double().sub_(local)


def outer_step(
    agreed: Tensor, velocity: Tensor, average: Tensor, *, lr: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """θ' and v', both float32."""
    after, moved = torch.empty_like(agreed), torch.empty_like(velocity)
    for part in parts(len(agreed)):
        moved[part] = velocity[part].double().mul_(momentum).add_(average[part])
        change = moved[part].double().mul_(momentum).add_(average[part]).mul_(lr)
        after[part] = agreed[part].double().sub_(change)
    return after, moved


def parts(length: int) -> Iterator[slice]:
    """A vector of this length, CHUNK numbers at a time; one part for an empty one."""
    for start in range(0, max(length, 1), CHUNK):
        yield slice(start, start + CHUNK)


def mix(local: Tensor, agreed: Tensor, keep: float) -> Tensor:
    """What a site goes on with: `keep` of its own parameters and the rest of the agreed ones. 0: the agreed ones."""
    return agreed.clone() if keep == 0 else local * keep + agreed * (1 - keep)
