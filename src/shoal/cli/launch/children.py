"""Child processes of `shoal run`: start them, restart those that die, stop them together.

Each child runs a `shoal` command, as it would on its own machine. Where forking is safe, children are forked from one
process that has imported everything they need (`preload`). This saves each child ten seconds on a laptop and a quarter of a
gigabyte, because PyTorch and transformers are imported once. Elsewhere each child is a new interpreter.
Invariants: after `stop_all` no child is left; each child ends when this process ends (`process.follow`). This module never
imports torch.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from shoal.cli.launch import process
from shoal.errors import ShoalError

MAX_RESTARTS = 5  # in a row, of one process; then the run fails
STEADY_S = 3600.0  # a process that ran for this long ends the row
# Measuring memory costs the kernel 20 ms per gigabyte.
MEASURE_S, MEASURE_SHARE = 5.0, 0.01  # shortest time between two measurements; largest share of time for them
STOP_S = 10.0  # between SIGTERM and SIGKILL
MAX_BACKOFF_S = 8.0
# hides a warning that would appear after the shell's prompt: multiprocessing removed a killed child's semaphores
QUIET = "ignore:resource_tracker:UserWarning"
MAX_QUOTED = 1000  # characters of a child's last log line that an error quotes
USAGE, EVICTED, LASTING = 2, 3, 4  # exit statuses of a child, see cli.main

# Every child returns only large blocks of memory to the system, which saves page faults. Its idle threads sleep. No
# library starts threads when it is imported, because `--threads` gives each role its share of the cores.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    **process.IDLE_THREADS,
    "PYTHONUNBUFFERED": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # for pyarrow; a process with threads should not fork
    **dict.fromkeys(process.THREAD_COUNTS, "1"),
}


@dataclass
class Child:
    """One process, and what is needed to restart it."""

    name: str
    command: list[str]
    log: Path
    context: BaseContext
    module: str = "shoal.cli"  # its `main` runs the command
    optional: bool = False  # the run continues without it
    restarts: int = 0
    in_a_row: int = 0  # restarts since it last ran for STEADY_S
    start_at_s: float = 0.0  # when it started, or when it is to start again
    process: BaseProcess | None = None
    ended: bool = False  # exited as intended: done, or evicted
    log_start_bytes: int = 0  # size of its log when it started

    def start(self) -> None:
        self.log_start_bytes = self.log.stat().st_size if self.log.exists() else 0
        arguments = (self.module, self.command, self.log)
        self.process = self.context.Process(target=_become, args=arguments, name=self.name, daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        self.start_at_s = time.monotonic()

    def exit_status(self) -> int | None:
        """Return the exit status (negative after a signal), or None if the child has not started or still runs."""
        return self.process.exitcode if self.process else None

    def last_line(self) -> str:
        """Return the last line that it logged since it started."""
        lines = self.log.read_bytes()[self.log_start_bytes :].splitlines()
        return next((line.decode(errors="replace") for line in reversed(lines) if line.strip()), "it logged nothing")

    def last_error(self) -> str:
        """Return the signal that ended it, or the start of the last log line, which names what failed."""
        status = self.exit_status() or 0
        if status < 0:
            return f"{self.name} was ended by signal {-status} ({signal.strsignal(-status)})"
        line = self.last_line()
        return line if len(line) <= MAX_QUOTED else f"{line[:MAX_QUOTED]}…"


class Children:
    """The child processes of a run. `device`: where they compute. CUDA may fail in a fork, so with CUDA none is forked."""

    def __init__(self, logs: Path, device: str, max_restarts: int = MAX_RESTARTS) -> None:
        self.logs = logs
        self.max_restarts = max_restarts
        self.all: list[Child] = []
        os.environ.update(ENVIRONMENT)  # libraries read it when a child starts
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), QUIET]))
        forks = sys.platform == "linux" and device == "cpu"
        self.context: BaseContext = multiprocessing.get_context("forkserver" if forks else "spawn")
        self.context.set_forkserver_preload(["shoal.cli.launch.preload"])

    def start(self, name: str, command: list[str], module: str = "shoal.cli", *, optional: bool = False) -> Child:
        child = Child(name, command, self.logs / f"{name}.log", self.context, module, optional)
        self.all.append(child)
        child.start()
        return child

    def run(self, name: str, command: list[str], module: str) -> str:
        """Run a command to its end and return its last output line. Raise ShoalError if it fails."""
        child = Child(name, command, self.logs / f"{name}.log", self.context, module)
        child.start()
        assert child.process is not None
        try:
            child.process.join()
        finally:
            child.process.terminate()
        if child.exit_status() != 0:
            raise ShoalError(child.last_error().removeprefix(f"shoal {name}: "))
        return child.last_line()

    def pids(self) -> dict[str, int]:
        """Return the process ids of started children by name; some may have exited."""
        return {child.name: child.process.pid for child in self.all if child.process and child.process.pid}

    def has_ended(self, name: str) -> bool:
        """Return whether the child of this name has exited as intended."""
        return any(child.ended for child in self.all if child.name == name)

    def restarts(self) -> dict[str, int]:
        return {child.name: child.restarts for child in self.all}

    def revive(self, say: Callable[[str], None]) -> None:
        """Restart children that died, with exponential backoff. Raise ShoalError if that does not help."""
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
        if time.monotonic() - child.start_at_s >= STEADY_S:
            child.in_a_row = 0
        is_final = code in (USAGE, LASTING)
        if is_final or child.in_a_row >= self.max_restarts:
            why = f"{child.last_error()} (see {child.log})"
            if child.optional:
                child.ended = True
                say(f"{child.name} ended, and the run continues without it: {why}")
                return
            what = "cannot run" if is_final else f"ended {child.in_a_row + 1} times in a row"
            raise ShoalError(f"{child.name} {what}: {why}")
        backoff_s = min(0.5 * 2**child.in_a_row, MAX_BACKOFF_S)
        child.restarts, child.in_a_row = child.restarts + 1, child.in_a_row + 1
        child.process, child.start_at_s = None, time.monotonic() + backoff_s
        how = f"by signal {-code}" if code < 0 else f"with status {code}: {child.last_error()}"
        say(f"{child.name} ended {how}; restart {child.in_a_row} in {backoff_s:g} s")

    def stop_all(self) -> None:
        running = [child.process for child in self.all if child.process and child.process.is_alive()]
        for each in running:
            each.terminate()
        deadline_s = time.monotonic() + STOP_S
        for each in running:
            each.join(max(0.1, deadline_s - time.monotonic()))
            if each.is_alive():
                each.kill()
                each.join()


def _become(module: str, command: list[str], log: Path) -> None:
    """Run the command in the child, in a session of its own; its output goes to the log."""
    starter, forker = multiprocessing.parent_process(), os.getppid()
    assert starter is not None
    process.follow(lambda: starter.is_alive() and os.getppid() == forker)
    os.setsid()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    process.show_title(command)
    sys.exit(importlib.import_module(module).main(command))


# --- memory and CPU time ----------------------------------------------------------------------------------------------


@dataclass
class Usage:
    """Peak memory and CPU time of processes, from Linux's /proc; a process that has ended keeps its last figures.

    Without /proc every figure is 0. Left out: the process that children are forked from, which shares all but about 40 MB of
    its pages with them, and its imports.
    """

    rss_bytes: dict[str, int] = field(default_factory=dict)  # by the process's name
    together_bytes: int = 0  # the highest sum of all processes at one time, with shared pages counted once
    seconds: dict[tuple[str, int], float] = field(default_factory=dict)  # CPU time by name and process id
    next_s: float = 0.0

    def measure(self, pids: Mapping[str, int]) -> bool:
        """Measure these processes, by name. Return False if it is too early for the next measurement."""
        started_s = time.monotonic()
        if started_s < self.next_s:
            return False
        for name, pid in pids.items():
            peak = _memory_bytes(pid, "status", "VmHWM:")
            self.rss_bytes[name] = max(self.rss_bytes.get(name, 0), peak)
            self.seconds[name, pid] = max(self.seconds.get((name, pid), 0.0), _cpu_s(pid))
        together = sum(_memory_bytes(pid, "smaps_rollup", "Pss:") for pid in pids.values())
        self.together_bytes = max(self.together_bytes, together)
        ended_s = time.monotonic()
        self.next_s = ended_s + max(MEASURE_S, (ended_s - started_s) / MEASURE_SHARE)
        return True

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU time of each name, over all its processes and their children that have ended."""
        result: dict[str, float] = {}
        for (name, _), seconds in self.seconds.items():
            result[name] = result.get(name, 0.0) + seconds
        return result


def _memory_bytes(pid: int, file: str, key: str) -> int:
    """Return a figure of /proc in bytes; 0 if it is unknown."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:  # the process has ended, or this system has no such file
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of its children that have ended; 0 if it is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may contain spaces
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
