"""What all sites agree on: parameters and velocity of the outer optimizer, fragment by fragment, and their file.

Invariant: it changes by `step` alone, so equal rounds give equal bits. As bytes it is safetensors, never a pickle.
Called by `site`, which holds a copy, and `meeting`, whose copy decides.
"""

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from shoal.diloco.codec import Encoded, parts
from shoal.diloco.fragments import Fragments, digest
from shoal.diloco.outer import outer_step
from shoal.errors import ShoalError


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
        """The state in tensors with the names of `tensors()`. Raises StateError for any other shape."""
        found = []
        for name in ("parameters", "velocity"):
            vectors = [tensors.get(f"agreed.{name}.{number}") for number in range(len(fragments))]
            if any(
                vector is None or vector.dtype != torch.float32 or tuple(vector.shape) != (size,)
                for vector, size in zip(vectors, fragments.sizes, strict=True)
            ):
                raise StateError(
                    f"it does not hold the {name} of {len(fragments)} fragments of {fragments.sizes} numbers"
                )
            found.append([vector for vector in vectors if vector is not None])
        return cls(*found)

    @classmethod
    def from_bytes(cls, data: bytes, fragments: Fragments) -> "Agreed":
        try:
            return cls.take(load(data), fragments)
        except SafetensorError as error:
            raise StateError(f"not a safetensors file: {error}") from error
