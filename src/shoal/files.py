"""Atomic, durable files: a file gets its final name once it is complete, and a folder is removed in one step.

Invariant: a file under its final name is complete. Until then it has a temporary name in the same folder, under which others
may read it while it grows. A file survives a power cut after `fsync`. If it was renamed or linked, the folder needs an
`fsync`, too.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3

from shoal.errors import ShoalError, first_line

CHUNK_BYTES = 1 << 20


class DamagedFileError(ShoalError):
    """A file that Shoal wrote has other contents now."""


class NewFile:
    """A file under a temporary name. `commit` gives it its final name. `close` removes it if it was not committed."""

    def __init__(self, path: Path, *, mode: int | None = None) -> None:
        """`mode` gives the exact permissions. If it is None, the umask decides."""
        self.path, self.mode = path, mode
        self.temporary = temporary(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.temporary.unlink(missing_ok=True)  # processes that still read the old file see that it has no links left
        self._fd = self._open()

    def write(self, offset_bytes: int, data: bytes | memoryview) -> None:
        with named_errors(self.path):
            write_all(self._fd, data, offset_bytes)

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        return os.pread(self._fd, size_bytes, offset_bytes)

    def truncate(self) -> None:
        """Discard the content, and start a new file. Readers of the old one see that it has no links left."""
        fd, self._fd = self._fd, -1
        os.close(fd)
        self.temporary.unlink(missing_ok=True)
        self._fd = self._open()

    def commit(self, *, durable: bool = True) -> None:
        """Give the file its final name; if `durable`, flush it to disk first.

        Shards need not be durable, because a restart verifies their hashes.
        """
        if durable:
            with named_errors(self.path):
                os.fsync(self._fd)
        self.temporary.rename(self.path)
        if durable:
            fsync(self.path.parent)

    def close(self) -> None:
        if self._fd >= 0:  # `truncate` may have failed
            os.close(self._fd)
        self.temporary.unlink(missing_ok=True)

    def _open(self) -> int:
        fd = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644 if self.mode is None else self.mode)
        if self.mode is not None:
            os.fchmod(fd, self.mode)  # because the umask may have removed bits
        return fd


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Add the path to an OSError that names no file, such as the error of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def new_file(path: Path, *, mode: int | None = None) -> Iterator[NewFile]:
    file = NewFile(path, mode=mode)
    try:
        yield file
    finally:
        file.close()


def write_file(path: Path, data: bytes, *, mode: int | None = None) -> None:
    write_pieces(path, [data], mode=mode)


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview], *, mode: int | None = None) -> None:
    with new_file(path, mode=mode) as file:
        offset_bytes = 0
        for piece in pieces:
            file.write(offset_bytes, piece)
            offset_bytes += len(piece)
        file.commit()


def unique_json(data: str | bytes | bytearray) -> Any:
    """Parse JSON. Raise ValueError also if a key is repeated, because readers differ in which value they take."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(fields := dict(pairs)) < len(pairs):
            raise ValueError("a key is repeated")
        return fields

    try:
        return json.loads(data, object_pairs_hook=unique)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> Any:
    """Read a file of JSON that Shoal wrote. Raise DamagedFileError, OSError."""
    return parse_json(path.read_bytes(), path)


def parse_json(data: str | bytes, path: Path) -> Any:
    """Parse JSON that was read from `path`. Raise DamagedFileError."""
    try:
        return json.loads(data)
    except ValueError as error:  # also if it is not UTF-8
        raise DamagedFileError(
            f"{path} is damaged ({first_line(error)}): restore it from a copy, or remove it"
        ) from error


def append_lines(path: Path, lines: Iterable[Any]) -> None:
    """Append lines of JSON to a file. If the disk is full, leave the file as it was. Raise OSError."""
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with named_errors(path), path.open("ab") as file:
        size_bytes = file.tell()
        try:
            write_all(file.fileno(), data, size_bytes)
        except OSError:
            file.truncate(size_bytes)
            raise


def keep_lines(path: Path, keep: Callable[[Any], bool]) -> None:
    """Keep only the lines of JSON that `keep` accepts, and drop an incomplete last line. Ignore a missing file."""
    if path.exists():
        complete = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        write_file(path, b"".join(line for line in complete if keep(parse_json(line, path))))


def write_all(fd: int, data: bytes | memoryview, offset_bytes: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset_bytes)
        view, offset_bytes = view[written:], offset_bytes + written


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to disk. Raise OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with named_errors(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def lock(path: Path) -> bool:
    """Lock a file until this process ends. Return False if another process holds the lock."""
    file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)  # stays open, because closing it would unlock it
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both
        os.close(file)
        return False
    return True


def commit_folder(temporary: Path, final: Path) -> None:
    """Flush a folder and all its files to disk, then give it its final name. Raise OSError, e.g. if the name is taken."""
    for path in sorted(temporary.rglob("*"), reverse=True):
        fsync(path)
    fsync(temporary)
    temporary.rename(final)
    fsync(final.parent)


def commit_folder_once(temporary: Path, final: Path) -> None:
    """Commit a folder, unless another process committed one with the same content under this name. Raise OSError."""
    try:
        commit_folder(temporary, final)
    except OSError:
        if not final.exists():
            raise


def digests(folder: Path) -> dict[str, str]:
    """Return the BLAKE3 digest of each file in a folder, by name.

    This uses only one thread, because several would hang in a forked process.
    """
    return {path.name: blake3().update_mmap(path).hexdigest() for path in folder.iterdir()}


def file_digest(path: Path) -> str:
    """Return a file's BLAKE3 digest, computed by all cores."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder of immutable files, with hard links if the file system has them."""
    shutil.copytree(source, target, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copy2(source, target)


def discard(folder: Path) -> None:
    """Remove a folder in one step, so that a half-removed folder never has its name. Ignore a missing folder."""
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    try:
        folder.rename(gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files and half-removed folders of a killed process."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)
    for path in folder.glob(".*.gone"):
        shutil.rmtree(path, ignore_errors=True)


def write_new_file(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Create a file atomically. Raise FileExistsError if the path is taken, even by a concurrent process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with named_errors(path):
            write_all(fd, data, 0)
            os.fsync(fd)
        path.hardlink_to(unfinished)  # unlike a rename, a link never overwrites
    finally:
        os.close(fd)
        unfinished.unlink()
    fsync(path.parent)
