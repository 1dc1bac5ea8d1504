"""How much memory the processes of a run hold, read from Linux's /proc.

Invariant: a peak never falls, even when its process has died. Called by `swarm`, for the summary.
Left out: systems without /proc, where every figure is 0; the process that children are forked from, which shares all but
some 40 MB of its pages with them.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MEASURE_S = 5.0  # between two measurements: one takes the kernel milliseconds per gigabyte


@dataclass
class Peaks:
    rss_bytes: dict[str, int] = field(default_factory=dict)  # of each process
    together_bytes: int = 0  # the most that all processes held at one moment, shared pages counted once
    measured_s: float = 0.0

    def measure(self, pids: Mapping[str, int]) -> bool:
        """Measure these processes, by name. Returns False if the last measurement is less than MEASURE_S ago."""
        if time.monotonic() - self.measured_s <= MEASURE_S:
            return False
        for name, pid in pids.items():
            peak = _memory_bytes(pid, "status", "VmHWM:")
            self.rss_bytes[name] = max(self.rss_bytes.get(name, 0), peak)
        together = sum(_memory_bytes(pid, "smaps_rollup", "Pss:") for pid in pids.values())
        self.together_bytes, self.measured_s = max(self.together_bytes, together), time.monotonic()
        return True


def _memory_bytes(pid: int, file: str, key: str) -> int:
    """A figure of /proc: peak resident (status, VmHWM), or held now with shared pages split (smaps_rollup, Pss)."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:  # the process has just ended, or this system has no such file: unknown counts as 0
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)
