"""A sandbox: warm fork servers of one tier, each of which runs one program at a time.

Invariants: every program gets a fresh child of a server that never runs programs itself. A server that died or failed
is replaced before its next use. The tier `plain` is used only if named. A confined tier works if a test program runs in
it and cannot open a socket. Thread-safe.
Left out: grading; systems other than Linux.
"""

import math
import queue
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import TracebackType

from shoal.sandbox import forkserver
from shoal.sandbox.forkserver import ForkServer
from shoal.sandbox.limits import PLAIN, TIERS, Budget, Program, ProgramLimits, Result, SandboxError, Tier
from shoal.sandbox.process import SandboxProcess

QUEUE_S = 300.0  # how long a caller waits for a free server
MIN_WALL_S = 1e-3  # wall limit of a program that starts after the budget has run out
REMEDY = {
    "bubblewrap": "install bubblewrap 0.8 or newer (`make sandbox`) and allow user namespaces; "
    "Ubuntu restricts them: sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    "kernel": "it needs Linux 5.14 or newer on x86_64 or aarch64, with Landlock, seccomp and user namespaces allowed",
}
PROBE = """
import socket
try:
    socket.socket()
    print("a socket")
except PermissionError:
    print("no socket")
"""


class Sandbox:
    """Runs `size` programs at once; further callers wait at most `QUEUE_S`.

    `tier`: a name, or None for the strongest that works. Raise SandboxError if the tier does not work here.
    `preloaded`: source by module name, executed once in each server, for programs to import.
    `budget`: when it runs out, all programs are stopped.
    `python`: the interpreter of the tier "plain", whose programs have this user's rights.
    """

    def __init__(
        self,
        tier: str | None = None,
        limits: ProgramLimits | None = None,
        size: int = 1,
        preloaded: Mapping[str, str] | None = None,
        budget: Budget | None = None,
        python: str | None = None,
    ) -> None:
        self.tier: str = best_tier() if tier is None else check(tier)
        self.limits = limits or ProgramLimits()
        self.budget = budget or Budget()
        self.size, self._preloaded, self._python = size, preloaded, python
        self._lock = threading.Lock()
        self._closed = False
        self._busy: set[ForkServer] = set()
        self._idle: queue.LifoQueue[ForkServer | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)  # started at first use

    def run(self, program: Program, limits: ProgramLimits | None = None) -> Result:
        """Run a program to its end."""
        return self._start(program, limits, frames=False).close()

    def open(self, program: Program, limits: ProgramLimits | None = None) -> SandboxProcess:
        """Start a program that imports `channel` and exchanges frames by `channel.receive` and `channel.send`.

        Close the process; until then it occupies one of the sandbox's servers.
        """
        return self._start(program, limits, frames=True)

    def close(self) -> None:
        """Kill every server and everything that runs in it."""
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        for server in busy:
            server.kill()
        while True:
            try:
                server_or_none = self._idle.get_nowait()
            except queue.Empty:
                return
            if server_or_none:
                server_or_none.kill()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, program: Program, limits: ProgramLimits | None, frames: bool) -> SandboxProcess:
        server = self._take()
        try:
            limits = limits or self.limits
            if limits.wall_s < math.inf:  # a program without a wall limit is stopped by its owner, not by the budget
                limits = replace(limits, wall_s=max(min(limits.wall_s, self.budget.left_s), MIN_WALL_S))
            return SandboxProcess(server, program, limits, frames, lambda: self._give_back(server))
        except BaseException:
            server.kill()
            self._give_back(server)
            raise

    def _take(self) -> ForkServer:
        if self._closed:
            raise SandboxError("the sandbox is closed: open another one")
        try:
            server = self._idle.get(timeout=QUEUE_S)
        except queue.Empty:
            message = f"no sandbox server was free for {QUEUE_S:.0f} s: close processes, or give a larger size"
            raise SandboxError(message) from None
        try:
            if server and server.dead:
                server.kill()
                server = None
            server = server or ForkServer(self.tier, self._preloaded, self._python)
        except BaseException:
            self._idle.put(None)
            raise
        with self._lock:
            self._busy.add(server)
            if not self._closed:
                return server
        server.kill()
        raise SandboxError("the sandbox is closed: open another one")

    def _give_back(self, server: ForkServer) -> None:
        with self._lock:
            self._busy.discard(server)
            closed = self._closed
        if closed or server.dead:
            server.kill()
            self._idle.put(None)
        else:
            self._idle.put(server)


@cache
def problem(tier: Tier) -> str:
    """Return why a tier does not work here, with the remedy; "" if it works. Each tier is tested once per process."""
    if not sys.platform.startswith("linux"):
        return f"the sandbox needs Linux, and this is {sys.platform}"
    if tier == "bubblewrap" and forkserver.bwrap() is None:
        return f"sandbox tier bubblewrap: no program bwrap found; {REMEDY[tier]}"
    try:
        server = ForkServer(tier)
        try:
            process = SandboxProcess(server, Program(PROBE), ProgramLimits(wall_s=20.0), False, done=lambda: None)
            result = process.close()
        finally:
            server.kill()
    except (SandboxError, OSError) as error:
        return f"{error}; {REMEDY[tier]}"
    if result.stdout != b"no socket\n":
        return f"sandbox tier {tier}: the test program gave a wrong result: {result}"
    return ""


def best_tier() -> Tier:
    """Return the strongest tier that works here. Raise SandboxError if none does."""
    for tier in TIERS:
        if not problem(tier):
            return tier
    reasons = "\n".join(problem(tier) for tier in TIERS)
    raise SandboxError(f"no sandbox for model-written code works here:\n{reasons}")


def check(tier: str) -> str:
    """Return `tier` if it works here. Raise SandboxError."""
    if tier == PLAIN:
        return tier
    if tier not in TIERS:
        raise SandboxError(f"unknown sandbox tier {tier!r}: one of {', '.join(TIERS)}")
    if reason := problem(tier):
        raise SandboxError(reason)
    return tier
