"""Check this machine: PyTorch, device, speed, numerics, memory, disk, sandbox.

Invariant: every finding that is not "ok" has a remedy. Nothing is changed. It takes a few seconds, mostly the import of
torch. Left out: disk and network speed, which a short probe cannot measure well.
"""

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.errors import first_line
from shoal.watch.figures import memory as size

GIB = 1 << 30
MIN_MEMORY_BYTES = 4 * GIB  # for all of `shoal run` with a small model
MIN_DISK_BYTES, SCARCE_DISK_BYTES = GIB, 10 * GIB
VERSION_BYTES = 2  # per parameter: versions are published in bf16
SLOW_GFLOPS = 20.0  # below it, even the smallest model trains for hours

Level = Literal["ok", "warning", "fails"]  # "fails" stops a run; "warning" costs speed, trust or comfort


@dataclass(frozen=True)
class CheckLine:
    """One line of the report: the subject, its level, and the remedy."""

    name: str
    level: Level
    text: str
    remedy: str = ""

    def line(self) -> str:
        return f"{self.level:7}  {self.name:8}  {self.text}" + (f"; {self.remedy}" if self.remedy else "")


def ok(name: str, text: str) -> CheckLine:
    return CheckLine(name, "ok", text)


def warning(name: str, text: str, remedy: str) -> CheckLine:
    return CheckLine(name, "warning", text, remedy)


def fails(name: str, text: str, remedy: str) -> CheckLine:
    return CheckLine(name, "fails", text, remedy)


def examine(folder: Path, device: str = "cpu") -> Iterator[CheckLine]:
    """Yield findings in the order in which to fix them. `folder`: where the run's folder would be."""
    from shoal.sandbox import TIERS, problem

    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        where = f"{platform.system()} on {platform.machine()}, on which Shoal was never run"
        yield warning("system", where, "expect to find what is missing; Linux on x86_64 is what is tested")
    yield from _computing(device)
    yield of_memory(memory_bytes(), _free_memory())
    yield of_disk(folder, free_bytes(folder))
    yield of_sandbox({tier: problem(tier) for tier in TIERS})


# --- torch -----------------------------------------------------------------------------------------------------------


def _computing(device: str) -> Iterator[CheckLine]:
    """Yield findings about torch, if it can be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:  # not installed, or its native library does not load
        why = f"cannot be imported: {first_line(error)}"
        yield fails("torch", why, "pip install torch (make setup takes the CPU build)")
        return
    from shoal.model.dtype import DeviceError, check_device, measure_gflops
    from shoal.model.numerics import refusal

    yield ok("torch", str(torch.__version__))
    try:
        check_device(device)
    except DeviceError as error:
        yield fails("device", str(error), "look at the driver with nvidia-smi")
        return
    yield of_device(device, [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())])
    gflops = {name: measure_gflops(getattr(torch, name), device) for name in ("float32", "bfloat16")}
    yield of_speed(gflops, torch.get_num_threads())
    yield of_numerics({name: refusal(name, device) or "" for name in ("float32", "bfloat16")})


def of_device(device: str, accelerators: list[str]) -> CheckLine:
    seen = f", {len(accelerators)} of {accelerators[0]}" if accelerators else ", no accelerator"
    if accelerators and device == "cpu":
        return warning("device", f"cpu{seen}", 'set model.device = "cuda" in the config')
    return ok("device", device + seen)


def of_speed(gflops: Mapping[str, float], threads: int) -> CheckLine:
    speeds = ", ".join(f"{name} {speed:.0f}" for name, speed in gflops.items())
    text = f"{speeds} GFLOP/s on {threads} thread{'s' * (threads != 1)}"
    if max(gflops.values()) < SLOW_GFLOPS:
        return warning("speed", text, "is the machine busy? else use a faster one, or configs/tiny.toml only")
    return ok("speed", text)


def of_numerics(inexact: Mapping[str, str]) -> CheckLine:
    """`inexact`: by dtype, why exact numerics are not available; "" if they are."""
    if exact := [name for name, why in inexact.items() if not why]:
        return ok("numerics", f"exact in {' and '.join(exact)}: work is checked to the last bit within a class")
    why = next(iter(inexact.values()))
    return warning(
        "numerics", f"fast only: {why}", "work is checked within tolerances; calibrate them (shoal calibrate)"
    )


# --- memory, disk, sandbox -------------------------------------------------------------------------------------------


def of_memory(total_bytes: int, unused_bytes: int) -> CheckLine:
    text, least = f"{size(total_bytes)}, {size(unused_bytes)} free", size(MIN_MEMORY_BYTES)
    if total_bytes < MIN_MEMORY_BYTES:
        return fails("memory", text, f"a run takes {least} or more: use another machine")
    if unused_bytes < MIN_MEMORY_BYTES:
        return warning("memory", text, f"free {least} before you start: end other programs")
    return ok("memory", text)


def of_disk(folder: Path, unused_bytes: int) -> CheckLine:
    there, text = _above(folder), f"{size(unused_bytes)} free in {folder}"
    if not there.is_dir():
        return fails("disk", f"{there} is not a folder", "choose another folder")
    if not os.access(there, os.W_OK):
        return fails("disk", f"{there} cannot be written by this user", "choose another folder, or change its owner")
    if unused_bytes < MIN_DISK_BYTES:
        return fails("disk", text, "free space, or choose a folder on another disk")
    if unused_bytes < SCARCE_DISK_BYTES:
        return warning("disk", text, "enough for a small model; `shoal check CONFIG` says what a run needs")
    return ok("disk", text)


def of_sandbox(problems: Mapping[str, str]) -> CheckLine:
    """`problems`: by tier, why it does not work; "" if it does."""
    if working := [tier for tier, why in problems.items() if not why]:
        return ok("sandbox", f"tiers that work: {', '.join(working)}")
    why = "; ".join(why for tier, why in problems.items() if why)
    return warning("sandbox", f"no sandbox works: {why}", "needed only for tasks that run model-written code")


def memory_bytes() -> int:
    """Return the machine's memory, or its container's limit if that is less."""
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).is_file() else ""
        if text.isdecimal():
            have = min(have, int(text))
    return have


def _free_memory() -> int:
    """Return Linux's MemAvailable; on other systems all memory."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min(free[0], memory_bytes()) if free else memory_bytes()


def free_bytes(folder: Path) -> int:
    """Return the free disk space where `folder` is or would be."""
    return shutil.disk_usage(_above(folder)).free


def _above(folder: Path) -> Path:
    """Return the folder or its closest existing ancestor."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
