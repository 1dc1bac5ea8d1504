"""What a benchmark ran on, for the results file beside its figures."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from shoal.model.dtype import measure_gflops


def describe() -> dict[str, Any]:
    """CPU, cores, versions, commit and the measured matrix product, GFLOP/s."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "gflops": {name: round(measure_gflops(getattr(torch, name)), 1) for name in ("float32", "bfloat16")},
    }
