"""A sandbox: warm fork servers, each of which runs one program at a time.

Invariant: every program gets a fresh child of a server that never ran one itself; a server that died or failed is replaced
before its next use. Safe for several threads. Called by code rewards, tools and rewards of your own.
Left out: grading. Nothing here knows what a right answer is.
"""

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType

from shoal.sandbox.conversation import Conversation
from shoal.sandbox.limits import Budget, Limits, Program, Result, SandboxError
from shoal.sandbox.process import ServerProcess
from shoal.sandbox.tiers import Tier, best_tier, check

QUEUE_S = 300.0  # how long a caller waits for a free server
LEAST_WALL_S = 1e-3  # of a program that begins after the end of the budget


class Sandbox:
    """`size` programs at once; more callers wait their turn, at most `queue_s`.

    `tier` None takes the best strong one; a name takes exactly that one. SandboxError if it does not work here.

    `preloaded` is source by module name, compiled and run once in each server: code of your own that programs import.
    `packages` are installed ones that programs may import too, by name; each server imports them once.
    `budget` stops all programs at its end.
    """

    def __init__(
        self,
        tier: str | None = None,
        limits: Limits | None = None,
        size: int = 1,
        queue_s: float = QUEUE_S,
        preloaded: Mapping[str, str] | None = None,
        packages: Sequence[str] = (),
        budget: Budget | None = None,
    ) -> None:
        if size < 1:
            raise SandboxError(f"sandbox size is {size}: give 1 or more")
        self.tier: Tier = best_tier() if tier is None else check(tier)
        self.limits = limits or Limits()
        self.budget = budget or Budget()
        self._queue_s = queue_s
        self._preloaded, self._packages = preloaded, packages
        self._lock = threading.Lock()
        self._closed = False
        self._busy: set[ServerProcess] = set()
        self._idle: queue.LifoQueue[ServerProcess | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)  # started at first use

    def run(self, program: Program, limits: Limits | None = None) -> Result:
        """Run a program to its end."""
        return self._begin(program, limits, frames=False).close()

    def open(self, program: Program, limits: Limits | None = None) -> Conversation:
        """Start a program that talks: it says `import channel` and calls `channel.receive()` and `channel.send(frame)`.

        Close the conversation; until then it holds one of the sandbox's servers.
        """
        return self._begin(program, limits, frames=True)

    def close(self) -> None:
        """Kill every server and all that runs in them."""
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

    def _begin(self, program: Program, limits: Limits | None, frames: bool) -> Conversation:
        server = self._take()
        try:
            limits = limits or self.limits
            limits = replace(limits, wall_s=max(min(limits.wall_s, self.budget.left_s), LEAST_WALL_S))
            return Conversation(server, program, limits, frames, lambda: self._give_back(server))
        except BaseException:
            server.kill()
            self._give_back(server)
            raise

    def _take(self) -> ServerProcess:
        if self._closed:
            raise SandboxError("the sandbox is closed: open another one")
        try:
            server = self._idle.get(timeout=self._queue_s)
        except queue.Empty:
            message = (
                f"no sandbox server was free for {self._queue_s:.0f} s: close conversations, or give a larger size"
            )
            raise SandboxError(message) from None
        try:
            if server and server.dead:
                server.kill()
                server = None
            server = server or ServerProcess(self.tier, self._preloaded, self._packages)
        except BaseException:
            self._idle.put(None)
            raise
        with self._lock:
            self._busy.add(server)
            if not self._closed:
                return server
        server.kill()
        raise SandboxError("the sandbox is closed: open another one")

    def _give_back(self, server: ServerProcess) -> None:
        with self._lock:
            self._busy.discard(server)
            closed = self._closed
        if closed or server.dead:
            server.kill()
            self._idle.put(None)
        else:
            self._idle.put(server)
