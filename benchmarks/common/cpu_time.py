"""The CPU seconds of another process. Linux."""

import time
from pathlib import Path


def cpu_s(pid: int) -> float:
    """User and system seconds so far of a process and its descendants that live, to the nanosecond."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return time.clock_gettime((~pid << 3) | 2) + sum(cpu_s(int(child)) for child in children)  # clock_getcpuclockid(3)
