"""Will this machine do? Versions, device, speed, numerics, memory, disk, limits, sandbox: measured, then judged.

Invariant: `examine` is a pure function of `Facts`, so it is tested with facts of machines that nobody has at hand; every
finding that is not "ok" has a remedy. `gather` changes nothing and takes a few seconds, most of them the import of torch.
Left out: the speed of a disk and of the network, which a run shows better than a probe of seconds.
"""

import os
import platform
import resource
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shoal.errors import first_line

OLDEST, NEWEST = (3, 11), (3, 13)  # of Python: what pyproject.toml states; docs/operate.md says what was tested
OLDEST_TORCH = "2.6"
GIB = 1 << 30
LEAST_MEMORY_GIB = 4.0  # for all of `shoal run` with a small model
LEAST_DISK_GIB, SCARCE_DISK_GIB = 1.0, 10.0
SLOW_GFLOPS = 20.0  # below it, even the smallest model trains for hours
FILES_NEEDED, FILES_WANTED = 256, 4096  # of a process that serves
NO_LIMIT = sys.maxsize

Verdict = Literal["ok", "warning", "fails"]


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, how it stands, and what to do about it."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if (self.verdict == "ok") == bool(self.remedy):
            raise ValueError(f"{self.name}: a remedy belongs to what is wrong, and to nothing else")

    def line(self, width: int = 0) -> str:
        """Wrapped and indented at `width` columns; in one line if `width` is 0."""
        line = f"{self.verdict:7}  {self.name:8}  {self.found}" + (f"; {self.remedy}" if self.remedy else "")
        below = " " * (7 + 2 + 8 + 2)
        wrapped = textwrap.wrap(line, width, subsequent_indent=below, break_long_words=False) if width else [line]
        return "\n".join(wrapped)


def ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


def warning(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, "warning", found, remedy)


def fails(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, "fails", found, remedy)


# --- facts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    python: tuple[int, int, int] = (3, 11, 0)
    system: str = "Linux"
    architecture: str = "x86_64"
    torch: str = ""  # its version; "" if it cannot be imported
    torch_error: str = ""
    accelerators: list[str] = field(default_factory=list)
    device: str = "cpu"  # that was asked for
    device_error: str = ""
    gflops: dict[str, float] = field(default_factory=dict)  # by dtype, on the device, on all cores
    inexact: dict[str, str] = field(default_factory=dict)  # by dtype: why exact numerics cannot be had; "" if they can
    threads: int = 0  # that torch computes on
    memory_bytes: int = 0  # the machine's, or what its container may use
    free_memory_bytes: int = 0
    folder: str = ""
    free_disk_bytes: int = 0
    folder_error: str = ""
    open_files: tuple[int, int] = (0, 0)  # soft and hard limit; NO_LIMIT if there is none
    sandbox: dict[str, str] = field(default_factory=dict)  # by tier: why it does not work; "" if it does


def gather(folder: Path, device: str = "cpu") -> Facts:
    """Measure this machine. `folder`: where a run would be."""
    from shoal.sandbox import TIERS, problem

    free_disk, folder_error = _disk_of(folder)
    return Facts(
        python=sys.version_info[:3],
        system=platform.system(),
        architecture=platform.machine(),
        memory_bytes=memory_bytes(),
        free_memory_bytes=_free_memory(),
        folder=str(folder),
        free_disk_bytes=free_disk,
        folder_error=folder_error,
        open_files=_open_files(),
        sandbox={tier: problem(tier) for tier in TIERS},
        **_computing(device),
    )


def _computing(device: str) -> dict[str, Any]:
    """What torch says and does, if it can be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:  # a missing package, or a library of its own that does not load here
        return {"torch_error": first_line(error)}
    from shoal.model.dtype import DeviceError, check_device, measure_gflops
    from shoal.model.numerics import refusal

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    found: dict[str, Any] = {"torch": str(torch.__version__), "accelerators": names, "device": device}
    try:
        check_device(device)
    except DeviceError as error:
        return found | {"device_error": str(error)}
    return found | {
        "gflops": {name: measure_gflops(getattr(torch, name), device) for name in ("float32", "bfloat16")},
        "inexact": {"float32": refusal("float32", device) or "", "bfloat16": refusal("bfloat16", device) or ""},
        "threads": torch.get_num_threads(),
    }


def memory_bytes() -> int:
    """The machine's memory, or the limit of the container that this process is in, if that is less."""
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).is_file() else ""
        if text.isdecimal():
            have = min(have, int(text))
    return have


def _free_memory() -> int:
    """What could be used without swapping, by Linux's own estimate; elsewhere all of it."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min(free[0], memory_bytes()) if free else memory_bytes()


def _disk_of(folder: Path) -> tuple[int, str]:
    """Free bytes where `folder` is or would be, and why nothing can be written there."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return 0, f"{there} is not a folder"
    return shutil.disk_usage(there).free, "" if os.access(there, os.W_OK) else f"{there} cannot be written by this user"


def _open_files() -> tuple[int, int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return tuple(NO_LIMIT if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))  # type: ignore[return-value]


# --- judgement -------------------------------------------------------------------------------------------------------


def examine(facts: Facts) -> list[Finding]:
    """Everything that matters, in the order in which to fix it. "fails" stops a run; "warning" costs speed or comfort."""
    return [
        _python(facts),
        *_system(facts),
        *_compute(facts),
        _memory(facts),
        _disk(facts),
        _files(facts),
        _sandbox(facts),
    ]


def _python(facts: Facts) -> Finding:
    version = ".".join(map(str, facts.python))
    if facts.python[:2] < OLDEST:
        return fails("python", version, f"install Python {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}")
    if facts.python[:2] > NEWEST:
        return warning("python", f"{version}, which nobody has tried", f"prefer {NEWEST[0]}.{NEWEST[1]}")
    return ok("python", version)


def _system(facts: Facts) -> Iterator[Finding]:
    if facts.system != "Linux" or facts.architecture not in ("x86_64", "AMD64"):
        yield warning(
            "system",
            f"{facts.system} on {facts.architecture}, on which Shoal was never run",
            "expect to find what is missing; Linux on x86_64 is what is tested",
        )


def _compute(facts: Facts) -> Iterator[Finding]:
    if not facts.torch:
        remedy = "pip install torch (make setup takes the CPU build)"
        yield fails("torch", f"cannot be imported: {facts.torch_error}", remedy)
        return
    if _numbers(facts.torch) < _numbers(OLDEST_TORCH):
        yield fails("torch", facts.torch, f"install torch {OLDEST_TORCH} or newer")
    else:
        yield ok("torch", facts.torch)
    if facts.device_error:
        yield fails("device", facts.device_error, "look at the driver with nvidia-smi")
        return
    seen = f", {len(facts.accelerators)} of {facts.accelerators[0]}" if facts.accelerators else ", no accelerator"
    if facts.accelerators and facts.device == "cpu":
        yield warning("device", f"cpu{seen}", 'set model.device = "cuda" in the config')
    else:
        yield ok("device", facts.device + seen)
    speeds = ", ".join(f"{name} {speed:.0f}" for name, speed in facts.gflops.items())
    speed = f"{speeds} GFLOP/s on {facts.threads} thread{'s' * (facts.threads != 1)}"
    if max(facts.gflops.values()) < SLOW_GFLOPS:
        yield warning("speed", speed, "is the machine busy? else use a faster one, or configs/tiny.toml only")
    else:
        yield ok("speed", speed)
    yield _numerics(facts)


def _numerics(facts: Facts) -> Finding:
    exact = [name for name, why in facts.inexact.items() if not why]
    if exact:
        return ok("numerics", f"exact in {' and '.join(exact)}: work is checked to the last bit within a class")
    why = next(iter(facts.inexact.values()))
    return warning(
        "numerics", f"fast only: {why}", "work is checked within tolerances; calibrate them (shoal calibrate)"
    )


def _memory(facts: Facts) -> Finding:
    found = f"{facts.memory_bytes / GIB:.1f} GiB, {facts.free_memory_bytes / GIB:.1f} free"
    if facts.memory_bytes < LEAST_MEMORY_GIB * GIB:
        return fails("memory", found, f"a run takes {LEAST_MEMORY_GIB:g} GiB or more: use another machine")
    if facts.free_memory_bytes < LEAST_MEMORY_GIB * GIB:
        return warning("memory", found, f"free {LEAST_MEMORY_GIB:g} GiB before you start: end other programs")
    return ok("memory", found)


def _disk(facts: Facts) -> Finding:
    found = f"{facts.free_disk_bytes / GIB:.1f} GiB free in {facts.folder}"
    if facts.folder_error:
        return fails("disk", facts.folder_error, "choose another folder, or change its owner")
    if facts.free_disk_bytes < LEAST_DISK_GIB * GIB:
        return fails("disk", found, "free space, or choose a folder on another disk")
    if facts.free_disk_bytes < SCARCE_DISK_GIB * GIB:
        return warning("disk", found, "enough for a small model; `shoal check CONFIG` says what a run needs")
    return ok("disk", found)


def _files(facts: Facts) -> Finding:
    soft, hard = facts.open_files
    found = "no limit" if hard == NO_LIMIT else f"{soft} open files, up to {hard}"
    remedy = "raise the hard limit: ulimit -Hn, or LimitNOFILE=65536 under systemd"
    if hard < FILES_NEEDED:
        return fails("files", found, remedy)
    return warning("files", f"{found}: few connections at once", remedy) if hard < FILES_WANTED else ok("files", found)


def _sandbox(facts: Facts) -> Finding:
    strong = [tier for tier, why in facts.sandbox.items() if not why and tier != "rlimits"]
    if strong:
        return ok("sandbox", f"tiers that work: {', '.join(strong)}")
    why = "; ".join(why for tier, why in facts.sandbox.items() if why and tier != "rlimits")
    return warning("sandbox", f"no strong tier works: {why}", "needed only for tasks that run model-written code")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal()]
