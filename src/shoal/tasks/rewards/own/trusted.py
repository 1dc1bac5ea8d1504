"""A plain process for a reward or environment of a trusted run: it sees what this user sees, and imports what is installed.

Invariant: no wait without a deadline; a process that misses it is killed with all it started, and the next call gets
a new one.
Called by `own.reward` where SHOAL_TRUST_RUN=1. Left out: isolation. That is the point, and why a person must ask for it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from shoal.sandbox import channel
from shoal.tasks.rewards.inside import RUN

START_S = 120.0  # for its imports
LARGEST_ANSWER = 1 << 20
BOOT = """
import sys, types
for name, text in {modules!r}.items():
    sys.modules[name] = module = types.ModuleType(name)
    exec(text, module.__dict__)
    if name == "channel":
        module.INCOMING = module.OUTGOING = int(sys.argv[1])
"""


class RewardError(Exception):
    """The function failed; the message says how."""


class RaisedError(RewardError):
    """It raised an exception, or returned no score."""


class TrustedFunction:
    """A process that runs `inside`; started by the first call and kept warm. Calls of several threads wait their turn."""

    def __init__(self, modules: Mapping[str, str], setup: bytes, wall_s: float) -> None:
        self.text = BOOT.format(modules={"channel": Path(channel.__file__).read_text(), **modules}) + RUN
        self.setup, self.wall_s = setup, wall_s
        self.process: subprocess.Popen[bytes] | None = None
        self.socket = socket.socket()
        self.ready = b""  # its answer to the setup
        self.lock = threading.Lock()

    def ask(self, call: bytes | None) -> tuple[bytes, bool]:
        """The answer to a call, or to the setup alone; and whether it came within half of the limit. Raises RewardError."""
        with self.lock:
            return self._ask(call)

    def _ask(self, call: bytes | None) -> tuple[bytes, bool]:
        started = time.monotonic()
        try:
            if self.process is None:
                self._start()
                self.ready = self._exchange(self.setup, START_S)
            answer = self.ready if call is None else self._exchange(call, self.wall_s)
        except TimeoutError:
            self.close()
            raise RewardError("it took longer than tasks.sandbox.wall_s") from None
        except OSError as error:
            self.close()
            raise RewardError(f"its process ended ({error})") from error
        if answer[:1] == b"X":
            if call is None or self.ready[:1] == b"X":
                self.close()
            raise RaisedError(answer[1:].decode(errors="replace"))
        return answer, time.monotonic() - started <= self.wall_s / 2

    def close(self) -> None:
        """Kill it, if it runs."""
        self.socket.close()
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def _start(self) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", self.text, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what it prints belongs to the log
                env=os.environ | {"PYTHONHASHSEED": "0"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def _exchange(self, frame: bytes, timeout_s: float) -> bytes:
        """Send a frame and wait for the next one. Raises OSError."""
        deadline = time.monotonic() + timeout_s
        self.socket.settimeout(timeout_s)
        self.socket.sendall(len(frame).to_bytes(4, "big") + frame)
        size = int.from_bytes(self._read(4, deadline), "big")
        if size > LARGEST_ANSWER:
            raise OSError(f"it answers {size} bytes")
        return self._read(size, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            self.socket.settimeout(max(1e-3, deadline - time.monotonic()))
            part = self.socket.recv(size - len(data))
            if not part:
                raise OSError("it closed its side")
            data += part
        return data
