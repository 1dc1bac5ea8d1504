"""The state that all sites agree on (parameters and the outer optimizer's velocity, as vectors), and the outer step.

    pseudo-gradient   d_i = θ − θ_i                      DiLoCo (arXiv 2311.08105), algorithm 1, line 11
    average           d   = 1/n Σ d_i                    line 12; weighted where sites were dealt unequal work (`meeting`)
    velocity          v'  = μ·v + d                      SGD with Nesterov momentum as in Sutskever et al. 2013,
    parameters        θ'  = θ − η·(d + μ·v')             in the form of torch.optim.SGD(nesterov=True)

θ are the parameters that all sites agree on, θ_i those of site i after its inner steps. The papers use η = 0.7, μ = 0.9.
Invariant: equal arguments give equal bits on every machine. Every operation above is elementwise in float64, where IEEE 754
fixes the rounding, and each result is rounded to float32 once. The state is stored as safetensors, never as a pickle.
"""

from collections.abc import Mapping
from hashlib import sha256
from math import prod

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from shoal.diloco.codec import Encoded, parts
from shoal.errors import ShoalError


def pseudo_gradient(agreed: Tensor, local: Tensor) -> Tensor:
    """Return θ − θ_i in float64, which is exact unless one number is 2^29 times the other."""
    return agreed.double() - local.double()


def outer_step(
    agreed: Tensor, velocity: Tensor, average: Tensor, *, lr: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """Return θ' and v', both float32."""
    moved = velocity.double().mul_(momentum).add_(average.double()).float()
    change = moved.double().mul_(momentum).add_(average.double()).mul_(lr)
    return agreed.double().sub_(change).float(), moved


class Shapes:
    """Convert parameters to one vector (float32 on the CPU, in the order of their names) and back."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = {name: tuple(shapes[name]) for name in sorted(shapes)}
        self.size = sum(prod(shape) for shape in self.shapes.values())

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Shapes":
        return cls({name: tuple(tensor.shape) for name, tensor in tensors.items()})

    def gather(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a copy of the parameters as one vector."""
        return torch.cat([tensors[name].detach().flatten().to("cpu", torch.float32) for name in self.shapes])

    @torch.no_grad()
    def scatter_(self, tensors: Mapping[str, Tensor], values: Tensor) -> None:
        """Set the parameters to the vector `values`."""
        at = 0
        for name, shape in self.shapes.items():
            tensors[name].copy_(values[at : at + prod(shape)].view(shape))
            at += prod(shape)


def digest(values: Tensor) -> str:
    """Return the SHA-256 of a vector's bytes."""
    return sha256(values.contiguous().view(torch.uint8).numpy().data).hexdigest()


class StateError(ShoalError):
    """A file does not contain this run's state."""


class Agreed:
    def __init__(self, parameters: Tensor, velocity: Tensor) -> None:
        self.parameters, self.velocity = parameters, velocity  # float32
        self.digest = digest(parameters)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], shapes: Shapes) -> "Agreed":
        """Return the state before the first round, with these parameters."""
        parameters = shapes.gather(tensors)
        return cls(parameters, torch.zeros_like(parameters))

    def step(self, average: Encoded, *, lr: float, momentum: float) -> None:
        """Make one outer step in place."""
        for part in parts(average.length):
            self.parameters[part], self.velocity[part] = outer_step(
                self.parameters[part], self.velocity[part], average.get(part), lr=lr, momentum=momentum
            )
        self.digest = digest(self.parameters)

    def tensors(self) -> dict[str, Tensor]:
        return {"agreed.parameters": self.parameters, "agreed.velocity": self.velocity}

    @classmethod
    def take(cls, tensors: Mapping[str, Tensor], shapes: Shapes) -> "Agreed":
        """Return the state from tensors named as in `tensors()`. Raise StateError if one is missing or has another shape."""
        result = []
        for name in ("parameters", "velocity"):
            vector = tensors.get(f"agreed.{name}")
            if vector is None or vector.dtype != torch.float32 or tuple(vector.shape) != (shapes.size,):
                raise StateError(f"it has no {name} of {shapes.size} numbers")
            result.append(vector)
        return cls(*result)

    @classmethod
    def from_bytes(cls, data: bytes, shapes: Shapes) -> "Agreed":
        """Parse the state from a safetensors file. Raise StateError."""
        try:
            return cls.take(load(data), shapes)
        except SafetensorError as error:
            raise StateError(f"not a safetensors file: {error}") from error
