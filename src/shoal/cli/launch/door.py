"""The dashboard of a running run: its address is open from the start, its server starts when somebody first looks.

Invariant: until then it costs a sleeping thread. The server is a process of its own with one thread; if it dies, the
next look starts another, and it ends with this process. Called by `swarm`.
"""

import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

from shoal.errors import UserError

STOP_S = 5.0


class DoorError(UserError):
    """A page cannot be served where it was told to be."""


def listen(host: str, port: int, what: str = "the dashboard") -> socket.socket:
    """Raises DoorError."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise DoorError(
            f"{what} cannot listen at {host}:{port}: {why}; choose another port, or 0 for a free one"
        ) from error


class Door:
    """Listens on `port` of this machine only; 0: any that is free."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        """Raises DoorError."""
        self.folder = folder
        self._listener = listen("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"
        self._wake, self._woken = os.pipe()
        self._server: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True, name="dashboard")
        self._thread.start()

    def close(self) -> None:
        os.close(self._woken)
        self._thread.join(STOP_S)
        if self._server:
            self._server.terminate()
            try:
                self._server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        self._listener.close()
        os.close(self._wake)

    def _watch(self) -> None:
        """Start the server at the first connection, and again at the next one after it died."""
        while True:
            ready, _, _ = select.select([self._listener.fileno(), self._wake], [], [])
            if self._wake in ready:
                return
            self._server = self._start()
            while self._server.poll() is None:
                if select.select([self._wake], [], [], 0.5)[0]:
                    return

    def _start(self) -> subprocess.Popen[bytes]:
        number = self._listener.fileno()
        command = [sys.executable, "-m", "shoal", "dashboard", str(self.folder), "--socket", str(number)]
        (self.folder / "logs").mkdir(exist_ok=True)
        with (self.folder / "logs" / "dashboard.log").open("ab") as log:
            return subprocess.Popen(
                command,
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for `shoal run`, which ends this one
            )
