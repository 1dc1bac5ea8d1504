"""Watches the folder where a learner writes its versions, and publishes the newest one while it is being written.

Invariant: a version that was given up once is not tried again before it is complete.
Called by the role `origin` and by `alone`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any

from shoal.files import CHUNK_BYTES
from shoal.shardcast.contents import entry, files_at, in_order, listed
from shoal.shardcast.files import final_size_bytes
from shoal.shardcast.manifest import ManifestError, version_name

LOOK_AGAIN_S = 0.01
STALL_S = 60.0
TEMPORARY = re.compile(r"\.(.+\.safetensors)\.tmp")


class GivenUpError(Exception):
    """This version will not be completed as it was started, and why."""


class Growing:
    """Must be closed."""

    def __init__(self, version: int, folder: Path, name: str, stopped: Callable[[], bool]) -> None:
        """Raises FileNotFoundError, LayoutError, ManifestError."""
        self.version, self.folder, self.name, self.stopped = version, folder, name, stopped
        self.final = folder.with_name(version_name(version))
        self._file = (folder / f".{name}.tmp").open("rb", buffering=0)
        try:
            self._final_bytes = final_size_bytes(self._file, name)
            others = [path for path in folder.rglob("*") if path.is_file() and not TEMPORARY.fullmatch(path.name)]
            self._file.seek(0)
            grows = entry(Path(name), self._file, self._final_bytes or 0)
            self.files = in_order([*listed(others, folder), grows], folder)
            self._others = [file for file in self.files if file.path != name]
            self._states = self._states_in(folder)
        except BaseException:
            self._file.close()
            raise
        self._seen_bytes, self._grew_s = 0, time.monotonic()

    @property
    def has_header(self) -> bool:
        return self._final_bytes is not None

    @property
    def identity(self) -> tuple[int, int]:
        """Identifies the growing file: device and inode."""
        stat = os.fstat(self._file.fileno())
        return stat.st_dev, stat.st_ino

    def open(self, name: str) -> BufferedReader:
        """Raises GivenUpError if the folder was removed, also if its writer has made it again."""
        if name == self.name:
            tail: Any = _Tail(self)
            return BufferedReader(tail, CHUNK_BYTES)
        for folder in (self.folder, self.final):  # it may be renamed meanwhile
            with suppress(FileNotFoundError):
                file = (folder / name).open("rb")
                if _state(os.fstat(file.fileno())) == self._states[name]:
                    return file
                file.close()
        raise self._removed()

    def size_bytes(self, name: str) -> int:
        return next(file.size_bytes for file in self.files if file.path == name)

    def chunks(self) -> Iterator[memoryview]:
        """All files' bytes as they arrive; each view is valid until the next one. Raises GivenUpError."""
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for published in self.files:
            with self.open(published.path) as file:
                while size_bytes := file.readinto1(buffer):
                    yield buffer[:size_bytes]

    def finish(self) -> Path:
        """Waits until the folder has its final name, and returns it. Raises GivenUpError unless it holds what was read."""
        written_s = self._written_s(self._final_bytes or 0)
        while not self.final.is_dir():
            self._check()
            time.sleep(LOOK_AGAIN_S)
        try:
            _, files = files_at(self.final)
            same = files == self.files and self._states_in(self.final) == self._states
            stat = (self.final / self.name).stat()
        except (FileNotFoundError, ManifestError) as error:
            raise GivenUpError(f"{self.final} was removed: {error}") from error
        if not same or (stat.st_dev, stat.st_ino, stat.st_mtime_ns) != (*self.identity, written_s):
            raise GivenUpError(f"{self.final} does not hold the files that were read while it was being written")
        return self.final

    def close(self) -> None:
        self._file.close()

    def available(self, offset_bytes: int) -> int:
        """Waits for a byte at `offset_bytes`; returns the number of bytes from there, 0 at the end. Raises GivenUpError."""
        while (arrived_bytes := os.fstat(self._file.fileno()).st_size) <= offset_bytes < (self._final_bytes or 0):
            if arrived_bytes > self._seen_bytes:
                self._seen_bytes, self._grew_s = arrived_bytes, time.monotonic()
            self._check()
            time.sleep(LOOK_AGAIN_S)
        return min(arrived_bytes, self._final_bytes or 0) - offset_bytes

    def _states_in(self, folder: Path) -> dict[str, tuple[int, int, int, int]]:
        return {file.path: _state((folder / file.path).stat()) for file in self._others}

    def _check(self) -> None:
        if self.stopped():
            raise GivenUpError(f"reading of {self.folder} was stopped")
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise self._removed()
        if time.monotonic() - self._grew_s > STALL_S:
            raise GivenUpError(f"{self.folder} has not grown for {STALL_S:.0f} s; check that its writer runs")

    def _removed(self) -> GivenUpError:
        return GivenUpError(f"{self.folder} was removed before it was complete; waiting for its writer to start again")

    def _written_s(self, size_bytes: int) -> int:
        """The modification time in nanoseconds. Raises GivenUpError if the file does not have `size_bytes`."""
        stat = os.fstat(self._file.fileno())
        if stat.st_size != size_bytes:
            raise GivenUpError(f"{self.folder / self.name} has {stat.st_size} bytes, its header says {size_bytes}")
        self._grew_s = time.monotonic()
        return stat.st_mtime_ns


def _state(stat: os.stat_result) -> tuple[int, int, int, int]:
    """Tells a file from another one of its name, and from itself after a write."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


class _Tail(RawIOBase):
    """The growing file as a raw stream; reading waits for missing bytes."""

    def __init__(self, growing: Growing) -> None:
        self.growing, self.name = growing, growing.name
        self._at_bytes = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset_bytes: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at_bytes, os.SEEK_END: self.growing.size_bytes(self.name)}
        self._at_bytes = origin[whence] + offset_bytes
        return self._at_bytes

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        available_bytes = self.growing.available(self._at_bytes)
        size_bytes = os.preadv(self.growing._file.fileno(), [view[: max(available_bytes, 0)]], self._at_bytes)
        self._at_bytes += size_bytes
        return size_bytes
