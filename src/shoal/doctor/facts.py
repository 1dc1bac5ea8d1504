"""What is true of this machine: versions, device, speed, memory, disk, limits, ports, sandbox, programs, packages.

Invariant: it measures and judges nothing; `examine` does that, so every judgement is tested with facts of machines that
nobody has at hand. Takes a few seconds, most of them the import of torch. Called by `shoal doctor`.
Left out: the speed of a disk and of the network, which a run shows better than a probe of seconds.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shoal.errors import first_line

Role = Literal["run", "coordinator", "learner", "origin", "relay", "worker", "validator", "evaluator"]
COMPUTING: tuple[Role, ...] = ("run", "learner", "worker", "validator", "evaluator")
PORTS: dict[Role, int] = {"coordinator": 8700, "origin": 8710, "relay": 8720}  # as docs/deploy.md proposes them
EXTRAS = {  # one package of each extra in pyproject.toml
    "8bit": "bitsandbytes",
    "browser": "playwright",
    "evm": "web3",
    "evals": "lm_eval",
    "s3": "obstore",
    "postgres": "psycopg",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
    "reasoning-gym": "reasoning_gym",
    "verifiers": "verifiers",
}
SERVERS = ("nginx", "postgres")
NO_LIMIT = sys.maxsize


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
    cores: int = 0  # that this process may use
    threads: int = 0  # that torch computes on
    memory_bytes: int = 0  # the machine's, or what its container may use
    free_memory_bytes: int = 0
    folder: str = ""
    free_disk_bytes: int = 0
    folder_error: str = ""
    open_files: tuple[int, int] = (0, 0)  # soft and hard limit; NO_LIMIT if there is none
    ports: dict[int, str] = field(default_factory=dict)  # why it cannot be listened on; "" if it can
    sandbox: dict[str, str] = field(default_factory=dict)  # by tier: why it does not work; "" if it does
    servers: dict[str, str] = field(default_factory=dict)  # optional programs and their versions; "" if not found
    extras: dict[str, bool] = field(default_factory=dict)


def gather(role: Role, folder: Path, device: str = "cpu", ports: list[int] | None = None) -> Facts:
    """Measure this machine, as far as `role` needs it. `ports` are listened on for a moment (default: the role's)."""
    from shoal.sandbox import TIERS, problem

    version, torch_error, accelerators = _torch() if role in COMPUTING else ("", "", [])
    computes = version != ""
    device_error = _device_error(device) if computes else ""
    wanted_ports = [PORTS[role]] if ports is None and role in PORTS else ports or []
    free_disk, folder_error = _disk(folder)
    return Facts(
        python=sys.version_info[:3],
        system=platform.system(),
        architecture=platform.machine(),
        torch=version,
        torch_error=torch_error,
        accelerators=accelerators,
        device=device,
        device_error=device_error,
        gflops=_gflops(device) if computes and not device_error else {},
        inexact=_inexact(device) if computes and not device_error else {},
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        threads=_threads() if computes else 0,
        memory_bytes=_memory(),
        free_memory_bytes=_free_memory(),
        folder=str(folder),
        free_disk_bytes=free_disk,
        folder_error=folder_error,
        open_files=_open_files(),
        ports={port: cannot_listen("0.0.0.0", port) for port in wanted_ports},  # noqa: S104 - for a moment, never accepted
        sandbox={tier: problem(tier) for tier in TIERS} if role in COMPUTING else {},
        servers={name: _program(name) for name in SERVERS},
        extras={extra: importlib.util.find_spec(package) is not None for extra, package in EXTRAS.items()},
    )


def cannot_listen(host: str, port: int) -> str:
    """Why nothing can listen there now; "" if it can."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port just left is free
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _torch() -> tuple[str, str, list[str]]:
    """Version, why it cannot be imported, and names of the accelerators that it sees."""
    try:
        import torch
    except (ImportError, OSError) as error:  # a missing package, or a library of its own that does not load here
        return "", first_line(error), []
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return str(torch.__version__), "", names


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _device_error(device: str) -> str:
    from shoal.model.dtype import DeviceError, check_device

    try:
        check_device(device)
    except DeviceError as error:
        return str(error)
    return ""


def _gflops(device: str) -> dict[str, float]:
    import torch

    from shoal.model.dtype import measure_gflops

    return {name: measure_gflops(getattr(torch, name), device) for name in ("float32", "bfloat16")}


def _inexact(device: str) -> dict[str, str]:
    from shoal.model.numerics import refusal

    return {"float32": refusal("float32", device) or "", "bfloat16": refusal("bfloat16", device) or ""}


def _memory() -> int:
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
    return min(free[0], _memory()) if free else _memory()


def _disk(folder: Path) -> tuple[int, str]:
    """Free bytes where `folder` is or would be, and why nothing can be written there."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return 0, f"{there} is not a folder"
    return shutil.disk_usage(there).free, "" if os.access(there, os.W_OK) else f"{there} cannot be written by this user"


def _open_files() -> tuple[int, int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return tuple(NO_LIMIT if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))  # type: ignore[return-value]


def _program(name: str) -> str:
    """What an installed server says of its version; "" if there is none."""
    flag = "-v" if name == "nginx" else "--version"
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    found = found or next((str(path) for path in sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))), None)
    if found is None:
        return ""
    said = subprocess.run([found, flag], capture_output=True, text=True, timeout=10)
    return (said.stdout + said.stderr).strip().splitlines()[0] if said.stdout or said.stderr else found
