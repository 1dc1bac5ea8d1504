"""A device that is not the CPU, for tests on machines without one: the CPU's kernels compute what is on it, bit for bit.

A tensor there holds one of the CPU. Where both meet in one operation, it raises, as a GPU does: only copies go from one to
the other, and tensors without dimensions count as numbers. Storages are those that are held, so that FSDP can free them.
PyTorch lets Python register one such device (`torch.utils.backend_registration`, which calls this experimental). An error in
a backward pass there ends the process: "terminate called without an active exception".
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
COPY_ = torch.ops.aten.copy_.default
COPIES = (torch.ops.aten._to_copy.default, COPY_)


class Module:
    """What PyTorch asks a device's module. The CPU's streams will do, and nothing is drawn there."""

    Stream, Event = torch.cpu.Stream, torch.cpu.Event
    stream, current_stream = staticmethod(torch.cpu.stream), staticmethod(torch.cpu.current_stream)

    def is_available(self) -> bool:
        return False  # a checkpoint would overlap its copies with streams

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_rng_state(self, device: Any = 0) -> Tensor:
        return torch.empty(0)

    def set_rng_state(self, state: Tensor, device: Any = 0) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        pass


@cache
def register() -> None:
    """Once in a process, and for all of its life."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())


class There(torch.Tensor):
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "There":
        made: There = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=f"{NAME}:0",
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: "There") -> None:
        torch._C.TensorBase.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held

    def __repr__(self, **_: Any) -> str:
        return f"There({self.held})"


class Factories(TorchDispatchMode):
    """Calls that make a tensor there of none that is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come here, too
        kwargs = kwargs or {}
        return computed(func, args, kwargs) if is_there(kwargs.get("device")) else func(*args, **kwargs)


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, There)]
    if there and func not in COPIES and any(tensor.ndim for tensor in tensors if not isinstance(tensor, There)):
        raise RuntimeError(f"{func}: tensors of the CPU and of the device {NAME} meet")
    to = kwargs.get("device")
    held_args, held = tree_map(lambda x: x.held if isinstance(x, There) else x, (args, kwargs))
    found = func(*held_args, **held if to is None else held | {"device": "cpu"})
    if func is COPY_ and not isinstance(args[0], There):
        return args[0]
    if not (there if to is None else is_there(to)):
        return found
    found = tree_map(lambda x: There(x) if isinstance(x, Tensor) else x, found)
    return return_and_correct_aliasing(func, args, kwargs, found) if there else found


def is_there(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


@contextmanager
def device() -> Iterator[str]:
    """Within it the device can be used, by FSDP also."""
    register()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # so that tied weights stay tied
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=NAME) is a copy then
    try:
        with (
            torch.autograd.set_multithreading_enabled(False),  # threads of devices are started once, perhaps by now
            Factories(),
            mock.patch.object(_fsdp_init, "_move_states_to_device", move_),
            mock.patch.object(_fsdp_param, "alloc_storage", of_held(_fsdp_param.alloc_storage)),
            mock.patch.object(_fsdp_param, "free_storage", of_held(_fsdp_param.free_storage)),
        ):
            yield NAME
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        torch._C._set_only_lift_cpu_tensors(False)


def move_(parameters: Iterable[Tensor], buffers: Iterable[Tensor], to: torch.device) -> None:
    """In place of FSDP's, which sets `data` to that of another class."""
    for tensor in (*parameters, *buffers):
        if not (tensor.is_meta or is_there(tensor.device)):
            torch.utils.swap_tensors(tensor, tensor.to(to))


def of_held(resize: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    return lambda tensor: resize(tensor.held if isinstance(tensor, There) else tensor)
