"""What a benchmark ran on, for the results file beside its figures."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WRITTEN = [":!benchmarks/results", ":!docs"]  # by benchmarks: figures and pictures change no code


def describe() -> dict[str, Any]:
    """CPU, cores, versions, commit and the measured matrix product, GFLOP/s."""
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
    """The commit of a checkout, with `-dirty` if a tracked file that could change a figure differs from it."""

    def git(*argv: str) -> str:
        return subprocess.run(
            ["git", "-C", str(tree), *argv], capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *WRITTEN)
    return git("rev-parse", "--short=10", "HEAD") + ("-dirty" if changed else "")
