"""Measure the peak memory of a process and all its descendants together. Shared pages are counted once.

Pss is read from Linux's /proc (smaps_rollup), but only when resident memory reaches a new maximum. The kernel walks every
page to compute Pss, so two samples per second would take a third of a core.
"""

import os
import threading
from pathlib import Path

SAMPLE_S = 0.25
PAGE = os.sysconf("SC_PAGE_SIZE")
HIGHER = 1.005  # sample Pss when resident memory exceeds its last sampled value by this factor


class Scales:
    """Samples memory while the `with` block runs. `together_bytes` is the peak, `samples` the number of samples."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.together_bytes = 0
        self.samples = 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._weigh, daemon=True)

    def __enter__(self) -> "Scales":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def _weigh(self) -> None:
        highest = 0.0
        while not self.stop.wait(SAMPLE_S):
            members = family(self.pid)
            resident = sum(map(resident_bytes, members))
            if resident > HIGHER * highest:
                highest = resident
                self.together_bytes = max(self.together_bytes, sum(map(pss_bytes, members)))
                self.samples += 1


def family(pid: int) -> list[int]:
    """Return `pid` and all its current descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has just ended
            continue
        children.setdefault(parent, []).append(int(folder.name))
    result = [pid]
    for member in result:
        result.extend(children.get(member, []))
    return result


def resident_bytes(pid: int) -> int:
    """Return a process's resident bytes, shared pages included, or 0 if it has just ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except OSError:
        return 0


def pss_bytes(pid: int) -> int:
    """Return a process's memory with its share of shared pages, or 0 if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
