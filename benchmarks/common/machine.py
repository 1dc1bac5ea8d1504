"""Write results, with the command, machine and commit that produced them."""

import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
DIGITS, WIDTH = 6, 120  # limits of a number's digits and of a line's characters, in raw files
INSIDE = "--inside"  # tells a script that it runs in its own namespaces (`namespaces`)
WRITTEN = [":!benchmarks/results", ":!docs"]  # git pathspecs that leave out what benchmarks write


def about() -> dict[str, Any]:
    """Return the first two entries of a raw file: the command that started this process, and the machine."""
    return {"command": command_line(), "machine": describe()}


def command_line() -> str:
    """Return the command that started this process, with absolute paths shortened to their last part."""
    words = [re.sub(r"(^|=)/.*/", r"\1", word) for word in sys.orig_argv[1:] if word != INSIDE]
    return " ".join(["python", *words])


def describe() -> dict[str, Any]:
    """Return the CPU, cores, versions, commit, and measured speed of matrix products in GFLOP/s."""
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
    """Return a checkout's commit, with `-dirty` if a changed tracked file could change a figure."""

    def git(*argv: str) -> str:
        return subprocess.run(
            ["git", "-C", str(tree), *argv], capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *WRITTEN)
    return git("rev-parse", "--short=10", "HEAD") + ("-dirty" if changed else "")


def save(path: Path, result: Any) -> None:
    """Write a raw file: JSON with numbers rounded to DIGITS digits. A list or object that fits stays on one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_layout(_rounded(result)) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    short = (
        float(f"{value:.{DIGITS}g}") if abs(value) < 10**DIGITS else round(value, 2)
    )  # Unix times keep their seconds
    return int(short) if short.is_integer() else short


def _layout(value: Any, indent: int = 0) -> str:
    line = json.dumps(value)
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if len(line) + indent <= WIDTH or not inner:
        return line
    if isinstance(value, list) and not any(isinstance(item, (dict, list)) for item in inner):
        return line
    keys = [f"{json.dumps(str(key))}: " for key in value] if isinstance(value, dict) else [""] * len(inner)
    lines = [" " * (indent + 1) + key + _layout(item, indent + 1) for key, item in zip(keys, inner, strict=True)]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([first, ",\n".join(lines), " " * indent + last])


def cpu_s(pid: int) -> float:
    """Return the user and system seconds of a living process and its living descendants. This works only on Linux."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return time.clock_gettime((~pid << 3) | 2) + sum(cpu_s(int(child)) for child in children)  # clock_getcpuclockid(3)
