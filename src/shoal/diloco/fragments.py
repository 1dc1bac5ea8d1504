"""A model's parameters as fragments: vectors that travel in turn, so that the link is never asked for all of them at once.

Layers are dealt to the fragments in turn (the strided pattern of Streaming DiLoCo, arXiv 2501.18512, section 2.3); what
belongs to no layer goes to the smallest fragment. One fragment is plain DiLoCo.
Invariant: every parameter is in one fragment, and the same parameters give the same fragments everywhere.
Called by `site`, `meeting` and whoever makes them.
"""

import re
from collections.abc import Mapping
from hashlib import sha256
from math import prod

import torch
from torch import Tensor

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
