"""Activation functions that give an element the same bits on any number of threads.

PyTorch splits a large tensor evenly among threads. It computes the elements at the end of a thread's share that do not
fill a vector with other code, which rounds differently. So an element's bits depend on the number of threads. Here every
share is a whole number of vectors.

Invariant: for a tensor whose number of elements is a multiple of VECTOR, the result does not depend on the threads. Exact
numerics pad the rows of every pass to a multiple of `products.UNIT`, so a width divisible by 4 is enough.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS

VECTOR = 64  # elements; the most that PyTorch's vector code computes at once (bfloat16, AVX-512, two vectors)
GRAIN = 32768  # elements; PyTorch gives a thread at least this many (at::internal::GRAIN_SIZE), but not in GELU
SERIAL = 8192  # elements; so few are never split
KINDS = tuple({kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()})


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function."""
    x = x.contiguous()  # PyTorch splits other tensors at the ends of rows, which need not be ends of vectors
    count = whole = x.numel()
    while extra := max(whole % (VECTOR * shares) for shares in _shares(whole)):
        whole -= extra
    if whole == count:
        return function(x)
    flat = x.view(-1)
    return torch.cat([function(part) for part in (flat[:whole], *torch.split(flat[whole:], SERIAL))]).view_as(x)


def _shares(count: int) -> list[int]:
    """Return the numbers of shares into which PyTorch may split a tensor of `count` elements, by function."""
    threads = torch.get_num_threads()
    return [max(1, min(threads, -(-count // GRAIN))), threads]


class WholeVectors(nn.Module):
    """An activation function in whole vectors."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return in_whole_vectors(self.function, x)


def use_exact_activations_(model: nn.Module) -> None:
    """Replace every activation function by its `WholeVectors`.

    Leave those with weights (PReLU, xIELU) as they are, because their weights would get other names.
    """
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, KINDS) and not layer.state_dict() and not isinstance(parent, WholeVectors):
                setattr(parent, name, WholeVectors(layer))
