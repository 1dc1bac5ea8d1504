"""Atomic, durable files: a file gets its final name once it is complete, and a folder is removed in one step.

Invariant: a file under its final name is complete. Until then it has a temporary name in the same folder, under which it
may be read while it grows. What `fsync` returned for survives a power cut; a renamed or linked file also needs it for its
folder. Every room that stores files uses this module; it imports nothing of Shoal.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3

CHUNK_BYTES = 1 << 20


class NewFile:
    """A file without its final name. `commit` gives it that name; otherwise `close` removes it."""

    def __init__(self, path: Path, *, mode: int = 0o644, exact_mode: bool = False) -> None:
        """`exact_mode`: the file gets `mode` whatever the process's umask is."""
        self.path = path
        self.mode, self.exact_mode = mode, exact_mode
        self.temporary = temporary(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.temporary.unlink(missing_ok=True)  # readers of the old file see that it ended
        self._fd = self._opened()

    def write(self, offset_bytes: int, data: bytes | memoryview) -> None:
        write_all(self._fd, data, offset_bytes)

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        return os.pread(self._fd, size_bytes, offset_bytes)

    def truncate(self) -> None:
        """Discards what was written and starts a new file, so that readers of the old one see that it ended."""
        fd, self._fd = self._fd, -1
        os.close(fd)
        self.temporary.unlink(missing_ok=True)
        self._fd = self._opened()

    def commit(self, *, durable: bool = True) -> None:
        """Gives the file its final name. Shards need not be durable, because a restart verifies their hashes."""
        if durable:
            os.fsync(self._fd)
        self.temporary.rename(self.path)
        if durable:
            fsync(self.path.parent)

    def close(self) -> None:
        os.close(self._fd)
        self.temporary.unlink(missing_ok=True)

    def _opened(self) -> int:
        fd = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, self.mode)
        if self.exact_mode:
            os.fchmod(fd, self.mode)
        return fd


def temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def new_file(path: Path, *, mode: int = 0o644, exact_mode: bool = False) -> Iterator[NewFile]:
    file = NewFile(path, mode=mode, exact_mode=exact_mode)
    try:
        yield file
    finally:
        file.close()


def write_file(path: Path, data: bytes, *, mode: int = 0o644, exact_mode: bool = False) -> None:
    write_pieces(path, [data], mode=mode, exact_mode=exact_mode)


def write_pieces(
    path: Path, pieces: Iterable[bytes | memoryview], *, mode: int = 0o644, exact_mode: bool = False
) -> None:
    with new_file(path, mode=mode, exact_mode=exact_mode) as file:
        at_bytes = 0
        for piece in pieces:
            file.write(at_bytes, piece)
            at_bytes += len(piece)
        file.commit()


def keep_lines(path: Path, keep: Callable[[Any], bool]) -> None:
    """Keep those lines of JSON that `keep` accepts. An incomplete last line goes; a missing file is ignored."""
    if path.exists():
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        write_file(path, "".join(line for line in whole if keep(json.loads(line))).encode())


def write_all(fd: int, data: bytes | memoryview, offset_bytes: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset_bytes)
        view, offset_bytes = view[written:], offset_bytes + written


def fsync(path: Path) -> None:
    """Returns once this file's content, or this folder's list of names, is on disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def commit_folder(temporary: Path, final: Path) -> None:
    """Gives a folder its final name once all that is in it is on disk. Raises OSError, also if the name is taken."""
    for path in sorted(temporary.rglob("*"), reverse=True):
        fsync(path)
    fsync(temporary)
    temporary.rename(final)
    fsync(final.parent)


def digests(folder: Path) -> dict[str, str]:
    """The BLAKE3 of each file in this folder, by name. On one thread: a pool of threads would hang in a forked process."""
    return {path.name: blake3().update_mmap(path).hexdigest() for path in folder.iterdir()}


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder of files that never change. Both share the bytes where the file system has hard links."""
    shutil.copytree(source, target, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def discard(folder: Path) -> None:
    """Removes a folder in one step, so that a half-removed one never has its name. A missing folder is ignored."""
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    try:
        folder.rename(gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Removes what a killed process left: temporary files and half-removed folders."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)
    for path in folder.glob(".*.gone"):
        shutil.rmtree(path, ignore_errors=True)


def write_new_file(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Creates a file, whole or not at all. Raises FileExistsError if the path is taken, even if only just now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        write_all(fd, data, 0)
        os.fsync(fd)
        path.hardlink_to(unfinished)  # a rename would overwrite; a link refuses, atomically
    finally:
        os.close(fd)
        unfinished.unlink()
    fsync(path.parent)
