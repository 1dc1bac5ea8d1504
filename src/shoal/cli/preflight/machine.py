"""Check this machine: PyTorch, device, speed, numerics, memory, sandbox, and the disk space that a run needs.

Invariants: every finding that is not "ok" has a remedy; nothing is changed. `disk_needs` is an upper bound for checkpoints
and weights, which are nearly all of a run's bytes; rollouts are not counted. `examine` takes a few seconds, mostly to import
torch. Left out: the speed of disk and network, which a short probe cannot measure well.
"""

import math
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.config import Config
from shoal.config.recipe import CHECKPOINT_BYTES
from shoal.errors import ShoalError, disk_is_full, first_line
from shoal.shardcast.origin import ANCHOR_EVERY
from shoal.shardcast.store import KEEP
from shoal.watch.figures import memory as size

GIB = 1 << 30
MIN_MEMORY_BYTES = 4 * GIB  # for all of `shoal run` with a small model
MIN_DISK_BYTES, SCARCE_DISK_BYTES = GIB, 10 * GIB
VERSION_BYTES = 2  # per parameter: versions are published in bf16
# per parameter: 4 each for agreed weights, their velocity and the carried rounding error, at most 8 for an average
ROUND_BYTES = 20
ROUNDS = 3  # states of the sites' meeting on disk: two are kept while the next one is written
# size of a delta, as a fraction of a version: measured 0.02 (135M parameters, lr 4e-5) to 0.15 (3M parameters, lr 1e-4)
DELTA_FRAC = 0.15
WORKER_KEEP, EVALUATOR_KEEP = 2, 1  # versions in the caches of these roles
KEEP_LESS = "free space there, choose another folder with --out, or keep less (learner.keep_last)"
RESERVE_BYTES = 64 << 20  # a run stops once less than this is left, so that it can still end cleanly
SLOW_GFLOPS = 20.0  # on a slower machine, even the smallest model trains for hours

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
        where = f"{platform.system()} on {platform.machine()}, on which Shoal was never tested"
        yield warning("system", where, "parts may not work: only Linux on x86_64 is tested")
    yield from _computing(device)
    yield of_memory(memory_bytes(), free_memory())
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
    seen = f", {len(accelerators)} x {accelerators[0]}" if accelerators else ", no accelerator"
    if accelerators and device == "cpu":
        return warning("device", f"cpu{seen}", 'set model.device = "cuda" in the config')
    return ok("device", device + seen)


def of_speed(gflops: Mapping[str, float], threads: int) -> CheckLine:
    speeds = ", ".join(f"{name} {speed:.0f}" for name, speed in gflops.items())
    text = f"{speeds} GFLOP/s on {threads} thread{'s' * (threads != 1)}"
    if max(gflops.values()) < SLOW_GFLOPS:
        return warning("speed", text, "end other programs, use a faster machine, or train configs/tiny.toml only")
    return ok("speed", text)


def of_numerics(inexact: Mapping[str, str]) -> CheckLine:
    """Return the finding about exact numerics. `inexact`: for each dtype, why they are unavailable, or ""."""
    if exact := [name for name, why in inexact.items() if not why]:
        return ok("numerics", f"exact in {' and '.join(exact)}: equal machines' work is checked to the last bit")
    why = next(iter(inexact.values()))
    return warning(
        "numerics", f"fast only: {why}", "work is checked within tolerances; calibrate them (shoal calibrate)"
    )


# --- memory, folder, sandbox -------------------------------------------------------------------------------------------


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
        return warning("disk", text, "enough for a small model; `shoal check CONFIG` estimates what a run needs")
    return ok("disk", text)


def of_sandbox(problems: Mapping[str, str]) -> CheckLine:
    """Return the finding about sandboxes. `problems`: for each tier, why it does not work, or ""."""
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


def free_memory() -> int:
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


# --- disk space of a run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiskNeeds:
    peak_bytes: int  # during the run
    kept_bytes: int  # after the run


def disk_needs(config: Config, parameters: int) -> DiskNeeds:
    """Return the disk space that a run of this config needs, for a model with this number of parameters."""
    learner, steps, sites = config.learner, config.run.steps, max(1, config.learner.sites)
    version = VERSION_BYTES * parameters
    checkpoint = version if learner.lora else CHECKPOINT_BYTES * parameters

    def versions(keep: int) -> int:
        return min(keep + 1, steps + 1) * version  # one more while the next is written

    stored = min(KEEP + ANCHOR_EVERY + 1, steps + 1)  # the versions that a store keeps, and those their deltas build on
    store = int((math.ceil(stored / ANCHOR_EVERY) + DELTA_FRAC * stored) * version)

    written = math.ceil(steps / learner.steps_between_checkpoints(0 if learner.lora else parameters))
    meeting = 0
    if learner.sites:
        meeting = ROUNDS * (version if learner.lora else ROUND_BYTES * parameters) + versions(learner.keep_versions)
    kept = sites * (checkpoint + versions(learner.keep_versions)) + version
    kept += store + meeting
    caches = config.workers.count * versions(WORKER_KEEP) + versions(EVALUATOR_KEEP)
    caches += config.validator.count * versions(config.coordinator.async_level + 2)
    caches += config.relays.count * store
    peak = kept + caches + sites * min(learner.keep_last, written - 1) * checkpoint
    return DiskNeeds(peak_bytes=peak, kept_bytes=kept)


def disk_finding(needs: DiskNeeds, free: int) -> CheckLine:
    text = f"up to {size(needs.peak_bytes)} during the run, up to {size(needs.kept_bytes)} after it, {size(free)} free"
    return ok("disk", text) if free >= needs.peak_bytes + RESERVE_BYTES else fails("disk", text, KEEP_LESS)


def used_bytes(folder: Path) -> int:
    """Return the bytes of all files below `folder`; a file with several hard links counts once."""
    sizes = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            stat = path.stat()
            sizes[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(sizes.values())


def file_system(folder: Path) -> Path:
    """Return where the file system that holds `folder` is mounted."""
    path = folder.resolve()
    while not path.is_mount():
        path = path.parent
    return path


def check_space(folder: Path, needs: DiskNeeds, free: int) -> None:
    """Raise ShoalError if the run in `folder` may need more than is `free` on its file system."""
    missing = needs.peak_bytes - used_bytes(folder) + RESERVE_BYTES
    if free < missing:
        raise ShoalError(
            f"the file system {file_system(folder)} has {size(free)} free, but this run needs up to {size(missing)} in "
            f"{folder}: {KEEP_LESS}"
        )


def check_left(folder: Path, free: int) -> None:
    """Raise ShoalError if the file system of a run in progress is nearly full."""
    if free < RESERVE_BYTES:
        left = f"{size(free)} are left; free space there, then resume"
        raise ShoalError(f"the file system {file_system(folder)} is full: {left}")


def explain(error: Exception, folder: Path) -> str:
    """Return the error's message. If a disk is full, also name the run's file system."""
    full = f"; the file system {file_system(folder)} is full: free space there, then resume"
    return f"{error}{full if disk_is_full(error) else ''}"
