"""Runs a trusted but slow Python function on values from strangers, with a limit on CPU time that nothing can outlast.

A pool of `size` processes. Each has imported the function's file once and forks a child per value (`trunk.py`).
Values and answers are JSON.
Invariants: `run` returns one result per value, in order, whatever the values do. The limit counts the CPU time of the child,
so a busy machine changes no result; `wall_s` is only for a function that waits. A result depends on its own value alone.
A pool ends with its owner: its processes notice that their input closed.
Called by the rewards `math` and `instructions`, and by the adapters. Left out: isolation (see `shoal.sandbox`), and memory
limits on systems other than Linux.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Self

from shoal.errors import ShoalError
from shoal.sandbox import Budget
from shoal.tasks.rewards.killable.trunk import LENGTH
from shoal.tasks.task import Grade

TRUNK = Path(__file__).with_name("trunk.py")
START_S = 120.0
SPARE_S = 30.0  # on top of wall_s, before a silent trunk is taken for broken
MAX_FRAME_BYTES = 2 << 20
NEAR = 0.5  # a call that used more than this share of a limit is not repeatable on a slower machine
# The same hashes, and with that the same order of sets, and one time zone on every machine.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "TZ": "UTC"}

Ending = Literal["answered", "raised", "cpu", "wall", "died"]


class GraderStartError(ShoalError):
    """A grader's process does not start; the message has its last words."""


@dataclass(frozen=True)
class Result:
    """How one call ended: with `value`, by an exception, at the limit of CPU time or the clock, or by a crash."""

    ending: Ending
    value: Any = None
    detail: str = ""
    cpu_s: float = 0.0
    memory_bytes: int = 0  # at its peak, beyond what the process had before the call


class Trunk:
    """One process that serves calls. Not for several threads at once."""

    def __init__(self, python: str, command: Sequence[str], wall_s: float) -> None:
        self.name, self.wall_s = command[0], wall_s
        self.process = subprocess.Popen(
            [python, "-P", str(TRUNK), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,  # Ctrl-C is for the owner
        )

    def await_ready(self) -> None:
        """Raises GraderStartError if it does not come up."""
        if self._receive(START_S) is None:
            self.kill()
            raise GraderStartError(
                f"the grader {self.name} does not start (exit status {self.process.returncode}); its error is on stderr "
                "above: correct it, or install what it imports"
            )

    def call(self, value: Any) -> Result | None:
        """None if the trunk itself died or went silent; it is dead then."""
        data = json.dumps(value).encode()
        assert self.process.stdin is not None
        if self.process.poll() is not None:
            return None
        try:
            self.process.stdin.write(LENGTH.pack(len(data)) + data)
            self.process.stdin.flush()
        except BrokenPipeError:
            self.kill()
            return None
        answer = self._receive(self.wall_s + SPARE_S)
        if answer is None:
            self.kill()
            return None
        return Result(**answer)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what was not sent is for nobody
                pipe.close()

    def _receive(self, timeout_s: float) -> Any | None:
        head = self._read(LENGTH.size, deadline := time.monotonic() + timeout_s)
        if head is None or (size := LENGTH.unpack(head)[0]) > MAX_FRAME_BYTES:
            return None
        body = self._read(size, deadline)
        return None if body is None else json.loads(body)

    def _read(self, size: int, deadline: float) -> bytes | None:
        assert self.process.stdout is not None
        fd, data = self.process.stdout.fileno(), b""
        arrival = select.poll()
        arrival.register(fd, select.POLLIN)
        while len(data) < size:
            if not arrival.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            part = os.read(fd, size - len(data))
            if not part:
                return None
            data += part
        return data


class Killable:
    """A pool for `function` of the Python file `file`. Its processes start with the first `run`, or with `start`.

    cpu_s and wall_s bound one call; memory_bytes is what one call may take beyond the imports. `arguments` go to the
    file's function `prepare`; `python` is the interpreter, which needs nothing of Shoal. No call begins after the end of
    `budget`.
    """

    def __init__(
        self,
        file: Path,
        function: str,
        *,
        size: int = 1,
        cpu_s: float = 1.0,
        wall_s: float = 60.0,
        memory_bytes: int = 512 << 20,
        arguments: Sequence[str] = (),
        python: str = sys.executable,
        budget: Budget | None = None,
    ) -> None:
        self.command = [str(file), function, str(cpu_s), str(wall_s), str(memory_bytes), *arguments]
        self.python, self.budget = python, budget or Budget()
        self.size, self.cpu_s, self.wall_s, self.memory_bytes = size, cpu_s, wall_s, memory_bytes
        self.idle: SimpleQueue[Trunk] = SimpleQueue()
        self.lock = threading.Lock()
        self.threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes and wait until they are ready. Raises GraderStartError."""
        with self.lock:
            if self.threads is not None:
                return
            trunks = [Trunk(self.python, self.command, self.wall_s) for _ in range(self.size)]
            try:
                for trunk in trunks:
                    trunk.await_ready()
            except GraderStartError:
                for trunk in trunks:
                    trunk.kill()
                raise
            for trunk in trunks:
                self.idle.put(trunk)
            self.threads = ThreadPoolExecutor(self.size)

    def run(self, values: Sequence[Any]) -> list[Result]:
        """One result per value, in order. Raises GraderStartError."""
        self.start()
        assert self.threads is not None
        return list(self.threads.map(self._call, values))

    def close(self) -> None:
        """End the processes. A later `run` starts others."""
        with self.lock:
            if self.threads is None:
                return
            self.threads.shutdown()
            self.threads = None
            while not self.idle.empty():
                self.idle.get().kill()

    def _call(self, value: Any) -> Result:
        if self.budget.over:
            return Result("wall")
        trunk = self.idle.get()
        try:
            for _ in range(2):  # a trunk may be killed by somebody else, such as an operator
                found = trunk.call(value)
                if found is not None:
                    return found
                trunk = Trunk(self.python, self.command, self.wall_s)
                trunk.await_ready()
        finally:
            self.idle.put(trunk)
        return Result("died", detail="the process of the grader ended twice")


def grade_of(result: Result, pool: Killable, answered: Callable[[Any, bool], Grade]) -> Grade:
    """The grade of a completion whose reward ran in a pool: a grader error unless the call answered.

    `answered` makes the grade of an answer, from its value and whether it is repeatable: whether the call stayed below half
    of its limits.
    """
    repeatable = result.cpu_s < NEAR * pool.cpu_s and result.memory_bytes < NEAR * pool.memory_bytes
    match result.ending:
        case "answered":
            return answered(result.value, repeatable)
        case "raised":
            return Grade(0.0, "grader_error", result.detail, repeatable=repeatable)
        case "died":
            return Grade(0.0, "grader_error", f"the grader died: {result.detail}", repeatable=False)
        case "cpu":
            detail = f"the limit of {pool.cpu_s:g} s of CPU time passed"
        case "wall":
            detail = f"the limit of {pool.wall_s:g} s passed without an answer"
    return Grade(0.0, "grader_error", detail, repeatable=False)
