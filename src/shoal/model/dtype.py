"""Measure in which dtype this process should compute; set its threads; return freed memory to the system.

The dtype is measured because a CPU's name and vendor do not predict which dtype is faster. Of two 2-core CPUs, one
reached 170 GFLOP/s in fp32 and 1 in bf16. The other reached 190 in fp32 and 850 in bf16. `shoal run` writes the result
into the resolved config.
Left out: fp16 and fp8. *Published* weights are bf16 in any case.
"""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch

from shoal.errors import UserError, first_line

DtypeName = Literal["float32", "bfloat16"]

SIZE = 512  # rows, columns and depth of the timed product on a CPU: 0.27 GFLOP
DEVICE_SIZE = 4096  # on a GPU: 137 GFLOP, so that starting the product takes none of the time
REPEATS = 5
BFLOAT16_MUST_WIN_BY = 1.2  # bf16 loses precision, so it must be clearly faster


class DeviceError(UserError):
    """A device that a config or an option names does not exist on this machine."""


def check_device(device: str) -> None:
    """Raise DeviceError for a device that torch cannot use here."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        why = first_line(error)
        raise DeviceError(f'device "{device}" cannot be used here: {why}; choose another, such as "cpu"') from error


def measure_gflops(dtype: torch.dtype, device: str = "cpu") -> float:
    """Measure the GFLOP/s of square matrix products in `dtype` with the current thread count. Return the best."""
    on_cpu = torch.device(device).type == "cpu"
    size = SIZE if on_cpu else DEVICE_SIZE
    a = torch.randn(size, size, device=device).to(dtype)
    if not on_cpu:
        torch.matmul(a, a)  # the first product on a GPU also loads libraries
        torch.cuda.synchronize(device)
    best_s = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        torch.matmul(a, a)
        if not on_cpu:
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - start)
        if best_s > 0.2:  # far too slow (bf16 is emulated): one measurement is enough
            break
    return 2 * size**3 / best_s / 1e9


def pick(wanted: str, device: str = "cpu") -> tuple[DtypeName, dict[str, float]]:
    """Return the dtype to compute in, and the GFLOP/s measured for each (empty unless `wanted` is "auto").

    Raise DeviceError.
    """
    check_device(device)
    if wanted == "float32":
        return "float32", {}
    if wanted == "bfloat16":
        return "bfloat16", {}
    if wanted != "auto":
        raise ValueError(f'unknown dtype {wanted!r}; use "auto", "float32" or "bfloat16"')
    speeds = {
        "float32": measure_gflops(torch.float32, device),
        "bfloat16": measure_gflops(torch.bfloat16, device),
    }
    wins = speeds["bfloat16"] > BFLOAT16_MUST_WIN_BY * speeds["float32"]
    return ("bfloat16" if wins else "float32"), speeds


def set_threads(threads: int) -> None:
    """Set the number of threads of this process; 0 keeps PyTorch's default."""
    if threads:
        torch.set_num_threads(threads)
        torch.set_num_interop_threads(1)


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """Use `threads` threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def release_memory() -> None:
    """Return freed memory to the system. Call this after freeing a large model. It takes milliseconds per gigabyte.

    Otherwise glibc keeps most freed blocks below its threshold (32 MB in children of `shoal run`).
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    """Return glibc's malloc_trim; None with another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library or system
        return None
