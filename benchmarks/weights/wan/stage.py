"""The network, folders and file of one transfer."""

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .network import Network

READY_S = 60.0
LOOK_AGAIN_S = 0.02


@dataclass
class Stage:
    """One transfer. Each node works in its own folder. A client's folder holds `sum`, for `b3sum -c`. The client writes the
    file as `file`, verifies it, and then creates `done`."""

    network: Network
    folder: Path
    file: Path  # the file to publish; a system may link or rename it
    digest: str  # BLAKE3
    scale: float
    started: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    sent: dict[str, int] = field(init=False)  # bytes that each client had sent before anything started

    def __post_init__(self) -> None:
        self.sent = self._sent()
        for name in self.network.nodes:
            self.at(name).mkdir(parents=True)
            (self.at(name) / "sum").write_text(f"{self.digest}  file\n")

    def at(self, name: str) -> Path:
        return self.folder / name

    def address(self, name: str) -> str:
        return self.network.address(name)

    def start(self, name: str, argv: Sequence[str | Path], **more: Any) -> subprocess.Popen[str]:
        process = self.network.start(name, argv, self.at(name) / "log", cwd=self.at(name), **more)
        self.started[name] = process
        return process

    def wait(self, names: Sequence[str], mark: str, holds: str = "") -> None:
        """Wait until each of these nodes has a file `mark` that contains the text `holds`."""
        deadline_s = time.monotonic() + READY_S
        while missing := [name for name in names if not self._holds(name, mark, holds)]:
            ended = [name for name in missing if self.started[name].poll() is not None]
            if ended or time.monotonic() > deadline_s:
                raise RuntimeError(f"{', '.join(ended or missing)} not ready: {self.log((ended or missing)[0])}")
            time.sleep(LOOK_AGAIN_S)

    def wait_asking(self) -> None:
        """Wait until all clients have sent a packet, so that none is still starting."""
        deadline_s = time.monotonic() + READY_S
        while silent := [name for name, sent in self._sent().items() if sent == self.sent[name]]:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{', '.join(silent)} sent no request: {self.log(silent[0])}")
            time.sleep(LOOK_AGAIN_S)

    def _holds(self, name: str, mark: str, text: str) -> bool:
        path = self.at(name) / mark
        return path.exists() and text in path.read_text(errors="replace")

    def _sent(self) -> dict[str, int]:
        nodes = self.network.stats()["nodes"]
        return {name: nodes[name]["sent_bytes"] for name in self.network.clients()}

    def log(self, name: str) -> str:
        """Return the end of the node's output."""
        path = self.at(name) / "log"
        return path.read_text(errors="replace")[-500:] if path.exists() else ""


class System(Protocol):
    def start(self, stage: Stage) -> None:
        """Start everything that can run before the file exists, and wait until it is ready."""

    def publish(self, stage: Stage) -> None:
        """Give the file to the origin. The origin's own work (hashing, cutting) counts as transfer time."""
