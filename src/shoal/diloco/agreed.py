"""What all sites agree on: parameters and velocity of the outer optimizer, in fragments, and the outer step.

    pseudo-gradient   d_i = θ − θ_i                      DiLoCo (arXiv 2311.08105), algorithm 1, line 11
    average           d   = 1/n Σ d_i                    line 12; weighted where sites were dealt unequal work
    velocity          v'  = μ·v + d                      SGD with Nesterov momentum as in Sutskever et al. 2013,
    parameters        θ'  = θ − η·(d + μ·v')             in the form of torch.optim.SGD(nesterov=True)
    delayed           θ_i ← α·θ_i + (1 − α)·θ'           Streaming DiLoCo (arXiv 2501.18512), algorithm 2

θ are the parameters that all sites agree on, θ_i those of site i after its inner steps. The papers use η = 0.7, μ = 0.9.
Fragments are vectors that travel in turn, so that the link is never asked for all parameters at once. Layers are dealt to
them in turn (the strided pattern of Streaming DiLoCo, section 2.3); what belongs to no layer goes to the smallest fragment.
One fragment is plain DiLoCo.

Invariant: equal arguments give equal bits on every machine. Each line above is one product or one sum in float64, which IEEE
754 rounds in one way only, and each result is rounded to float32 once. There is no sum over elements. Every parameter is in
one fragment, and the state as bytes is safetensors, never a pickle.
"""

import re
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


LAYER = re.compile(r"\.(\d+)\.")


class Fragments:
    def __init__(self, shapes: Mapping[str, tuple[int, ...]], count: int = 1) -> None:
        self.shapes = {name: tuple(shapes[name]) for name in sorted(shapes)}
        self.names: list[list[str]] = [[] for _ in range(count)]
        loose = []
        for name in self.shapes:
            layer = LAYER.search(name)
            self.names[int(layer[1]) % count].append(name) if layer else loose.append(name)
        for name in sorted(loose, key=lambda name: (-prod(self.shapes[name]), name)):
            min(self.names, key=self._size).append(name)
        self.sizes = [self._size(names) for names in self.names]

    def __len__(self) -> int:
        return len(self.names)

    def gather(self, tensors: Mapping[str, Tensor], number: int) -> Tensor:
        """A copy of a fragment's parameters as one float32 vector on the CPU."""
        return torch.cat([tensors[name].detach().flatten().to("cpu", torch.float32) for name in self.names[number]])

    @torch.no_grad()
    def scatter_(self, tensors: Mapping[str, Tensor], number: int, values: Tensor) -> None:
        """Sets a fragment's parameters to these values."""
        at = 0
        for name in self.names[number]:
            shape = self.shapes[name]
            tensors[name].copy_(values[at : at + prod(shape)].view(shape))
            at += prod(shape)

    def _size(self, names: list[str]) -> int:
        return sum(prod(self.shapes[name]) for name in names)


def digest(values: Tensor) -> str:
    """SHA-256 of a vector's bytes: equal for equal bits."""
    return sha256(values.contiguous().view(torch.uint8).numpy().data).hexdigest()


class StateError(ShoalError):
    """A file that does not hold the state of this run."""


class Agreed:
    def __init__(self, parameters: list[Tensor], velocity: list[Tensor]) -> None:
        self.parameters = parameters  # one float32 vector per fragment
        self.velocity = velocity
        self.digests = [digest(values) for values in parameters]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], fragments: Fragments) -> "Agreed":
        """The state before the first round, of these parameters."""
        vectors = [fragments.gather(tensors, number) for number in range(len(fragments))]
        return cls(vectors, [torch.zeros_like(vector) for vector in vectors])

    def step(self, number: int, average: Encoded, *, lr: float, momentum: float) -> None:
        """One outer step of one fragment, in place."""
        parameters, velocity = self.parameters[number], self.velocity[number]
        for part in parts(average.length):
            parameters[part], velocity[part] = outer_step(
                parameters[part], velocity[part], average.get(part), lr=lr, momentum=momentum
            )
        self.digests[number] = digest(parameters)

    def tensors(self) -> dict[str, Tensor]:
        named = {"parameters": self.parameters, "velocity": self.velocity}
        return {f"agreed.{name}.{number}": vector for name, all in named.items() for number, vector in enumerate(all)}

    @classmethod
    def take(cls, tensors: Mapping[str, Tensor], fragments: Fragments) -> "Agreed":
        """The state in tensors with the names of `tensors()`. Raise StateError for any other shape."""
        result = []
        for name in ("parameters", "velocity"):
            vectors = [tensors.get(f"agreed.{name}.{number}") for number in range(len(fragments))]
            if any(
                vector is None or vector.dtype != torch.float32 or tuple(vector.shape) != (size,)
                for vector, size in zip(vectors, fragments.sizes, strict=True)
            ):
                raise StateError(
                    f"it does not hold the {name} of {len(fragments)} fragments of {fragments.sizes} numbers"
                )
            result.append([vector for vector in vectors if vector is not None])
        return cls(*result)

    @classmethod
    def from_bytes(cls, data: bytes, fragments: Fragments) -> "Agreed":
        try:
            return cls.take(load(data), fragments)
        except SafetensorError as error:
            raise StateError(f"not a safetensors file: {error}") from error
