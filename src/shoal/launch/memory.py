"""How much memory the processes of a run hold, read from Linux's /proc.

Invariant: a peak never falls, though the process it is of has died. Called by `swarm`, for the summary.
Left out: systems without /proc, where every figure is 0; the process that children are forked from, whose memory is
theirs but for some 40 MB.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

WEIGH_S = 5.0  # between two measurements: reading one takes the kernel milliseconds a gigabyte


@dataclass
class Peaks:
    rss_bytes: dict[str, int] = field(default_factory=dict)  # each process's own peak
    together_bytes: int = 0  # the most that all processes held at one moment, shared pages counted once
    weighed_s: float = 0.0

    def weigh(self, pids: Mapping[str, int]) -> None:
        """Measure these processes, by name, unless that was done a moment ago."""
        if time.monotonic() - self.weighed_s <= WEIGH_S:
            return
        for name, pid in pids.items():
            peak = _memory_bytes(pid, "status", "VmHWM:")
            self.rss_bytes[name] = max(self.rss_bytes.get(name, 0), peak)
        together = sum(_memory_bytes(pid, "smaps_rollup", "Pss:") for pid in pids.values())
        self.together_bytes, self.weighed_s = max(self.together_bytes, together), time.monotonic()


def _memory_bytes(pid: int, file: str, key: str) -> int:
    """A figure of Linux's /proc: peak resident (status, VmHWM), or held now with shared pages split (smaps_rollup, Pss)."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:  # it has just ended, or this system has no such file: unknown counts as none
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)
