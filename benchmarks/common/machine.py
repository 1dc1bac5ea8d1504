"""Where results go, and what a benchmark ran on: its command, machine and commit stand beside its figures."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
WRITTEN = [":!benchmarks/results", ":!docs"]  # by benchmarks: figures and pictures change no code


def command_line() -> str:
    """Return the command that started this process. Absolute paths become names: they say nothing on another machine."""
    return " ".join(["python", *(Path(word).name if word.startswith("/") else word for word in sys.orig_argv[1:])])


def describe() -> dict[str, Any]:
    """Return the CPU, cores, versions, commit and the measured matrix product, GFLOP/s."""
    import torch

    from shoal.model.dtype import measure_gflops

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "gflops": {name: round(measure_gflops(getattr(torch, name)), 1) for name in ("float32", "bfloat16")},
    }


def commit(tree: Path = ROOT) -> str:
    """Return the commit of a checkout, with `-dirty` if a tracked file that could change a figure differs from it."""

    def git(*argv: str) -> str:
        return subprocess.run(
            ["git", "-C", str(tree), *argv], capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *WRITTEN)
    return git("rev-parse", "--short=10", "HEAD") + ("-dirty" if changed else "")


def cpu_s(pid: int) -> float:
    """Return user and system seconds of a living process and its living descendants. Linux."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return time.clock_gettime((~pid << 3) | 2) + sum(cpu_s(int(child)) for child in children)  # clock_getcpuclockid(3)
