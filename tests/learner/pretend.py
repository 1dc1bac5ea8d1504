"""A device that is not the CPU, for tests on machines without one: what meets on it is computed by the CPU's kernels.

Its tensors hold a CPU tensor each, and may meet the CPU's own only where they would on a GPU: in copies, and as numbers.
Anything else raises. So a test sees which tensors are where, and gets the bits of the CPU.
PyTorch lets Python register one device (`torch.utils.backend_registration`).
"""

from contextlib import contextmanager
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
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Module:
    """What PyTorch asks a device's module: the CPU's streams will do."""

    Stream, Event = torch.cpu.Stream, torch.cpu.Event
    stream, current_stream = staticmethod(torch.cpu.stream), staticmethod(torch.cpu.current_stream)

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Nothing is drawn there."""

    def get_rng_state(self, device: Any = 0) -> Tensor:
        return torch.empty(0)

    def set_rng_state(self, state: Tensor, device: Any = 0) -> None:
        """Nothing is drawn there."""


class There(torch.Tensor):
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "There":
        made: There = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=f"{NAME}:0"
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
    def data(self, value: Any) -> None:
        torch._C.TensorBase.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held

    def __repr__(self, **_: Any) -> str:
        return f"There({self.held})"


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [leaf for leaf in leaves if isinstance(leaf, There)]
    if there and func not in COPIES and any(not isinstance(leaf, There) and leaf.ndim for leaf in leaves):
        raise RuntimeError(f"{func}: tensors on the CPU and on the device meet")
    to = kwargs.get("device")
    lands = bool(there) if to is None else torch.device(to).type == NAME
    held = tree_map(lambda x: x.held if isinstance(x, There) else x, (args, kwargs))
    given = held[1] | ({"device": "cpu"} if to is not None else {})
    found = func(*held[0], **given)
    if not lands:
        return args[0] if func is COPIES[1] else found
    found = tree_map(lambda x: There(x) if isinstance(x, Tensor) else x, found)
    return return_and_correct_aliasing(func, args, kwargs, found) if there else found


class Factories(TorchDispatchMode):
    """Tensors that are made there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come here, too
        kwargs = kwargs or {}
        to = kwargs.get("device")
        if to is not None and torch.device(to).type == NAME:
            return computed(func, args, kwargs)
        return func(*args, **kwargs)


def move_(parameters: Any, buffers: Any, device: torch.device) -> None:
    """As FSDP does where tensors of both devices are of one class."""
    for tensor in (*parameters, *buffers):
        if not isinstance(tensor, There) and not tensor.is_meta and tensor.device != device:
            torch.utils.swap_tensors(tensor, tensor.to(device))


def of_held(call: Any) -> Any:
    """FSDP resizes storages: here, those of the tensors that are held."""
    return lambda tensor: call(tensor.held if isinstance(tensor, There) else tensor)


_setup_privateuseone_for_python_backend(NAME, backend_module=Module())


@contextmanager
def device() -> Any:
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # so that tied weights stay tied
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=NAME) is a copy then
    try:
        with (
            Factories(),
            mock.patch.object(_fsdp_init, "_move_states_to_device", move_),
            mock.patch.object(_fsdp_param, "alloc_storage", of_held(_fsdp_param.alloc_storage)),
            mock.patch.object(_fsdp_param, "free_storage", of_held(_fsdp_param.free_storage)),
        ):
            yield NAME
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        torch._C._set_only_lift_cpu_tensors(False)
