"""Sums the replicas' gradients over the ranks while the backward pass still computes the other gradients.

    backward    last layers ............... first layers
    all-reduce       bucket 0 | bucket 1 | ...... bucket N | wait

The backward pass ends with the first layers, so buckets hold the parameters in the reverse of the model's order.
Invariant: all ranks start the same all-reduces in the same order, in whatever order their gradients become ready.
Called by `net`. Source: Li et al. 2020, "PyTorch Distributed", arXiv:2006.15704, section 3.2.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

BUCKETS = 8  # of a model: enough to overlap, and few enough that a link's latency does not count
SMALLEST_BYTES = 1 << 18


class Work(Protocol):
    def wait(self) -> object: ...


def all_reduce(flat: Tensor) -> Work:
    import torch.distributed as dist

    work: Work = dist.all_reduce(flat, async_op=True)
    return work


Running = tuple[Work | None, Tensor, list[nn.Parameter]]  # an all-reduce, its tensor, and the parameters it belongs to


class GradientSums:
    """`start` begins to sum a tensor over the ranks, in place."""

    def __init__(self, parameters: Iterable[nn.Parameter], start: Callable[[Tensor], Work] = all_reduce) -> None:
        self.buckets, self.start = buckets(list(parameters)), start
        self.waited_s = 0.0  # after backward passes
        self.summed_bytes = 0

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Within it runs the last backward pass of a step. Afterwards `loss` and each `grad` are sums over the ranks."""
        missing = [set(bucket) for bucket in self.buckets]
        home = {parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket}
        running: list[Running] = [(self.start(loss), loss, [])]

        def ready(parameter: nn.Parameter) -> None:
            missing[home[parameter]].remove(parameter)
            while (number := len(running) - 1) < len(missing) and not missing[number]:
                running.append(self._begin(self.buckets[number]))

        hooks = [parameter.register_post_accumulate_grad_hook(ready) for parameter in home]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        while (number := len(running) - 1) < len(self.buckets):  # those with a parameter that the loss does not need
            running.append(self._begin(self.buckets[number]))
        _finish(loss.device)
        ended_s = time.monotonic()
        for work, flat, bucket in running:
            if work is not None:
                work.wait()
            self.summed_bytes += flat.nbytes
            parts = torch.split(flat, [parameter.numel() for parameter in bucket]) if bucket else ()
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        _finish(loss.device)
        self.waited_s += time.monotonic() - ended_s

    def _begin(self, bucket: list[nn.Parameter]) -> Running:
        held = [parameter for parameter in bucket if parameter.grad is not None]
        if not held:
            return None, torch.empty(0), []
        flat = torch.cat([parameter.grad.flatten() for parameter in held])  # type: ignore[union-attr]
        return self.start(flat), flat, held


def _finish(device: torch.device) -> None:
    """Wait for what the device was told to compute."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """About equal parts of the parameters that are trained, last ones first."""
    trained = [parameter for parameter in reversed(parameters) if parameter.requires_grad]
    room = max(SMALLEST_BYTES, sum(parameter.nbytes for parameter in trained) // BUCKETS)
    found, size = list[list[nn.Parameter]](), room
    for parameter in trained:
        if size >= room:
            found.append([])
            size = 0
        found[-1].append(parameter)
        size += parameter.nbytes
    return found
