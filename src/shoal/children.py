"""The processes of a run as children of `shoal run`: started, started again when they die, stopped together.

Invariant: after `stop_all` no child is left. Called by `swarm`; each child ends by itself when this process is gone
(`process.follow`). Never imports torch.
"""

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STOP_S = 10.0  # between SIGTERM and SIGKILL
LONGEST_BACKOFF_S = 8.0
EVICTED, USAGE = 3, 2  # exit statuses of a child, see cli


class ChildError(Exception):
    """A process of the run that does not stay up; the message says which, why, and where its log is."""


@dataclass
class Child:
    """One process, and what it takes to start it again."""

    name: str
    argv: list[str]
    log: Path
    threads: int
    restarts: int = 0
    start_at_s: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    ended: bool = False  # on purpose: done, or evicted

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(self.threads),
                start_new_session=True,
            )

    def exit_status(self) -> int | None:
        """Negative: the signal that ended it. None while it runs, and before it is started."""
        return self.process.poll() if self.process else None

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][-300:] if lines else "nothing in its log"


class Children:
    def __init__(self, logs: Path, max_restarts: int) -> None:
        self.logs = logs
        self.max_restarts = max_restarts
        self.all: list[Child] = []

    def start(self, name: str, argv: list[str], threads: int) -> Child:
        child = Child(name, argv, self.logs / f"{name}.log", threads)
        self.all.append(child)
        child.start()
        return child

    def pids(self) -> dict[str, int]:
        """Process ids by name, of those that are started (they may have ended since)."""
        return {child.name: child.process.pid for child in self.all if child.process}

    def restarts(self) -> dict[str, int]:
        return {child.name: child.restarts for child in self.all}

    def revive(self, say: Callable[[str], None]) -> None:
        """Start those that died once more, later each time. Raises ChildError for one that died too often."""
        for child in self.all:
            self._revive(child, say)

    def _revive(self, child: Child, say: Callable[[str], None]) -> None:
        if child.ended:
            return
        if child.process is None:
            if time.monotonic() >= child.start_at_s:
                child.start()
            return
        code = child.exit_status()
        if code is None:
            return
        if code in (0, EVICTED):
            child.ended = True
            return
        if code == USAGE or child.restarts >= self.max_restarts:
            raise ChildError(f"{child.name} ended {child.restarts + 1} times: {child.last_words()} (see {child.log})")
        backoff_s = min(0.5 * 2**child.restarts, LONGEST_BACKOFF_S)
        child.restarts += 1
        child.process, child.start_at_s = None, time.monotonic() + backoff_s
        how = f"by signal {-code}" if code < 0 else f"with status {code}: {child.last_words()}"
        say(f"{child.name} ended {how}; restart {child.restarts} in {backoff_s:g} s")

    def stop_all(self) -> None:
        running = [child.process for child in self.all if child.process and child.process.poll() is None]
        for process in running:
            process.terminate()
        deadline_s = time.monotonic() + STOP_S
        for process in running:
            try:
                process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def environment(threads: int) -> dict[str, str]:
    """A child's environment: its share of the cores, and memory that goes back to the system in large pieces only."""
    counts = {v: str(threads) for v in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    reuse = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}  # fewer page faults
    return os.environ | reuse | counts | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
