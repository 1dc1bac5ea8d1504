"""One running program, seen from outside: read its output, send it frames, stop it at its limits.

Invariant: whatever the program does, no call takes longer than the wall limit plus twice `GRACE_S`. No call keeps more
than `output_bytes` plus `CHUNK` bytes in memory.
Left out: the meaning of frames. Frames are untrusted bytes: parse them with limits, and never unpickle them.
"""

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from shoal.sandbox.forkserver import ForkServer
from shoal.sandbox.limits import Outcome, Program, ProgramLimits, Result, SandboxError

GRACE_S = 5.0  # time for the supervisor to kill everything and report; if it takes longer, the server is killed
CHUNK = 1 << 16
MAX_WAIT_S = 3600.0  # the longest wait of one `poll` call
OUT_OF_MEMORY = 10  # SIGUSR1, see program.py


class SandboxProcess:
    """A running program. Not thread-safe."""

    def __init__(
        self, server: ForkServer, program: Program, limits: ProgramLimits, frames: bool, done: Callable[[], None]
    ):
        self._server, self._limits, self._done = server, limits, done
        self._started = time.monotonic()
        self._deadline = self._started + limits.wall_s
        self._text: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray(), "frames": bytearray()}
        self._received_bytes = 0  # over all streams
        self._reading: dict[int, str] = {}  # descriptor -> stream
        self._to_send = bytearray()
        self._sending = -1  # descriptor for frames to the program; -1: closed
        self._reports = b""  # the supervisor's JSON lines
        self._ended = False  # all of the program's processes have ended
        self._stopped: Outcome | None = None
        self._result: Result | None = None
        self._failure: SandboxError | None = None
        self._start(program, frames)

    def _start(self, program: Program, frames: bool) -> None:
        streams = ["stdout", "stderr", *(["frames"] if frames else [])]
        pairs = {name: os.pipe() for name in streams}
        self._leash, their_leash = socket.socketpair()
        self._reading = {read: name for name, (read, _) in pairs.items()}
        written = {name: write for name, (_, write) in pairs.items()}
        theirs = [written["stdout"], written["stderr"], their_leash.fileno()]
        if frames:
            incoming, self._sending = os.pipe()
            theirs += [incoming, written["frames"]]
            os.set_blocking(self._sending, False)
        for descriptor in (*self._reading, self._leash.fileno()):
            os.set_blocking(descriptor, False)
        try:
            self._server.start(program, self._limits, theirs)
        except OSError:
            self._stopped = "killed"  # the server died; `close` raises
        finally:
            their_leash.close()
            for descriptor in theirs:
                if descriptor != theirs[2]:
                    os.close(descriptor)

    def send(self, frame: bytes) -> None:
        """Send one frame. Buffer it until the program reads it; drop it after the program's end."""
        if self._sending >= 0:
            self._to_send += len(frame).to_bytes(4, "big") + frame
            self._pump(time.monotonic(), lambda: False)

    def receive(self) -> bytes | None:
        """Return the program's next frame, or None if no more will come; `close` then returns how the program ended."""
        self._pump(self._deadline, lambda: self._whole_frame() or "frames" not in self._reading.values())
        if self._whole_frame():
            buffer, size = self._text["frames"], self._frame_size()
            frame = bytes(buffer[4 : 4 + size])
            del buffer[: 4 + size]
            return frame
        if "frames" in self._reading.values() and self._stopped is None:
            self._stop("timeout")
        return None

    def close(self, timeout_s: float | None = None) -> Result:
        """Send no more frames and wait until the program ends. Idempotent.

        Stop the program after `timeout_s` or at its wall limit. Raise SandboxError if the sandbox itself failed; the
        server is then replaced.
        """
        if self._failure is not None:
            raise self._failure
        if self._result is None:
            if self._sending >= 0:
                self._pump(time.monotonic(), lambda: False)
                self._hang_up()
            deadline = self._deadline if timeout_s is None else min(self._deadline, time.monotonic() + timeout_s)
            try:
                self._result = self._finish(deadline)
            except SandboxError as error:
                self._failure = error  # the server was returned to the pool; do not return it twice
                raise
            finally:
                for descriptor in list(self._reading):
                    os.close(descriptor)
                self._reading.clear()
                self._leash.close()
                self._done()
        return self._result

    def __enter__(self) -> "SandboxProcess":
        return self

    def __exit__(self, *error: object) -> None:
        if self._result is None and self._failure is None:
            self._stop("killed")
            self.close()

    def _finish(self, deadline: float) -> Result:
        self._pump(deadline, lambda: self._ended)
        if not self._ended:
            self._stop("timeout")
            self._pump(time.monotonic() + GRACE_S, lambda: self._ended, stopping=True)
        self._drain()
        wall_s = time.monotonic() - self._started
        reports: list[dict[str, Any]] = [json.loads(line) for line in self._reports.splitlines()]
        if not (reports and self._ended and self._server.finished(GRACE_S)):
            self._server.kill()
        failures = [report["error"] for report in reports if "error" in report]
        if failures:
            raise SandboxError(f"sandbox tier {self._server.tier} could not run a program: {failures[0]}")
        if not reports and self._stopped is None:
            raise SandboxError(
                f"the sandbox server (tier {self._server.tier}) died while running a program; run it again"
            )
        code: int = reports[0]["code"] if reports else 0
        cpu_s, memory_bytes = (reports[0]["cpu_s"], reports[0]["memory_bytes"]) if reports else (0.0, 0)
        outcome = self._stopped or self._judge(code, reports[0]["timely"] if reports else True, cpu_s)
        exit_code = None if self._stopped else code
        stdout, stderr = bytes(self._text["stdout"]), bytes(self._text["stderr"])
        return Result(outcome, exit_code, stdout, stderr, cpu_s, wall_s, memory_bytes, self._server.tier)

    def _judge(self, code: int, timely: bool, cpu_s: float) -> Outcome:
        if not timely or cpu_s >= self._limits.cpu_s:
            return "timeout"
        if code == -OUT_OF_MEMORY:
            return "memory"
        return "exited" if code >= 0 else "killed"

    def _stop(self, outcome: Outcome) -> None:
        """Close the leash. The supervisor then kills everything and reports."""
        if self._stopped is None:
            self._stopped = outcome
        self._hang_up()
        with contextlib.suppress(OSError):  # the supervisor may have exited
            self._leash.shutdown(socket.SHUT_WR)

    def _pump(self, deadline: float, done: Callable[[], bool], stopping: bool = False) -> None:
        """Read and write bytes until `done()`, the deadline, or a limit."""
        while not done() and (self._stopped is None or stopping):
            poll = select.poll()
            for descriptor in self._reading:
                poll.register(descriptor, select.POLLIN)
            if not self._ended:
                poll.register(self._leash.fileno(), select.POLLIN)
            if self._to_send and self._sending >= 0:
                poll.register(self._sending, select.POLLOUT)
            left_s = min(deadline - time.monotonic(), MAX_WAIT_S)
            ready = poll.poll(max(0.0, left_s * 1000))
            for descriptor, _ in ready:
                self._move(descriptor)
            if not ready and left_s <= 0:
                return

    def _move(self, descriptor: int) -> None:
        if descriptor == self._leash.fileno():
            part = self._leash.recv(CHUNK)
            self._reports += part
            # Do not rely on end of file: a process that the caller forked may hold a copy of the other end.
            self._ended = not part or b'"code"' in self._reports
        elif descriptor == self._sending:
            try:
                del self._to_send[: os.write(descriptor, self._to_send[:CHUNK])]
            except BrokenPipeError:
                self._hang_up()
        elif descriptor in self._reading:
            self._read(descriptor)

    def _read(self, descriptor: int) -> bool:
        """Read available bytes of one stream. Return False if there are none."""
        try:
            part = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        if not part:
            os.close(descriptor)
            del self._reading[descriptor]
            return False
        room = self._limits.output_bytes - self._received_bytes
        self._text[self._reading[descriptor]] += part[:room]
        self._received_bytes += min(room, len(part))
        if len(part) > room or self._frame_size() > self._limits.output_bytes:
            self._stop("output")
            return False
        return True

    def _drain(self) -> None:
        """Read the output that is still in the pipes."""
        for descriptor in list(self._reading):
            while self._stopped is None and self._read(descriptor):
                pass

    def _frame_size(self) -> int:
        return int.from_bytes(self._text["frames"][:4], "big") if len(self._text["frames"]) >= 4 else 0

    def _whole_frame(self) -> bool:
        return len(self._text["frames"]) >= 4 and len(self._text["frames"]) >= 4 + self._frame_size()

    def _hang_up(self) -> None:
        if self._sending >= 0:
            os.close(self._sending)
            self._sending = -1
