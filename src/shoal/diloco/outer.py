"""The outer step of DiLoCo as pure functions: what one site's training is worth, and what all do with the average.

    pseudo-gradient   d_i = θ − θ_i                      DiLoCo (arXiv 2311.08105), algorithm 1, line 11
    average           d   = 1/n Σ d_i                    line 12; weighted where sites were dealt unequal work
    velocity          v'  = μ·v + d                      SGD with Nesterov momentum as in Sutskever et al. 2013,
    parameters        θ'  = θ − η·(d + μ·v')             in the form of torch.optim.SGD(nesterov=True)
    delayed           θ_i ← α·θ_i + (1 − α)·θ'           Streaming DiLoCo (arXiv 2501.18512), algorithm 2

θ are the parameters that all sites agree on, θ_i those of site i after its inner steps. The papers use η = 0.7, μ = 0.9.

Invariant: equal arguments give equal bits on every machine. Each line is one product or one sum in float64, which IEEE 754
rounds in one way only, and each result is rounded to float32 once. There is no sum over elements.
Called by `site` and `meeting`. All tensors are vectors of equal length on the CPU.
"""

from torch import Tensor


def pseudo_gradient(agreed: Tensor, local: Tensor) -> Tensor:
    """θ − θ_i in float64, where the difference of two float32 is exact unless one is 2^29 times the other."""
    return agreed.double() - local.double()


def outer_step(
    agreed: Tensor, velocity: Tensor, average: Tensor, *, lr: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """θ' and v', both float32."""
    moved = velocity.double().mul_(momentum).add_(average.double()).float()
    change = moved.double().mul_(momentum).add_(average.double()).mul_(lr)
    return agreed.double().sub_(change).float(), moved


def mix(local: Tensor, agreed: Tensor, keep: float) -> Tensor:
    """What a site goes on with: `keep` of its own parameters and the rest of the agreed ones. 0: the agreed ones."""
    return local * keep + agreed * (1 - keep)
