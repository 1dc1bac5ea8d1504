"""A folder of immutable, content-addressed files: the default store.

Invariant: a file's name is the BLAKE3 digest of its content, and a file under its final name is complete (`shoal.files`).
Called by the coordinator, which serves it over HTTP. A pool that outgrows one machine uses a `bucket`.
"""

import errno
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from shoal.errors import ShoalError
from shoal.files import NewFile, remove_leftovers

HASH = re.compile(r"[0-9a-f]{64}")
FULL = {errno.ENOSPC, errno.EDQUOT}


class StoreError(ShoalError):
    """A file cannot be stored or read; the message names it and the next step."""


class DamagedFileError(StoreError):
    """A stored file is missing or was changed, so its content is lost."""


class BucketError(StoreError):
    """The bucket did not answer as expected, which says nothing about the file."""


class FileStore(Protocol):
    """The interface that a folder and a bucket share. For uploads, a folder has `receive` and a bucket has `grant`."""

    def put(self, kind: str, data: bytes) -> str:
        """Store a file and return its hash. Storing the same bytes again changes nothing. Raise StoreError."""
        ...

    def get(self, kind: str, content_hash: str) -> bytes:
        """Return a file. Raise DamagedFileError if it is missing or was changed, StoreError if it cannot be read."""
        ...


class Folder:
    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, kind: str, data: bytes) -> str:
        """Store a file and return its hash."""
        with self.receive(kind) as incoming:
            incoming.write(data)
            return incoming.commit()

    @contextmanager
    def receive(self, kind: str) -> Iterator["IncomingFile"]:
        """Receive a file in pieces. Without `commit` it is discarded."""
        incoming = IncomingFile(self, kind)
        try:
            yield incoming
        finally:
            incoming.close()

    def clean(self) -> None:
        """Remove the unfinished files of a process that was killed."""
        for kind in self.root.glob("*/"):
            remove_leftovers(kind)

    def get(self, kind: str, content_hash: str) -> bytes:
        """Return a file. Raise DamagedFileError if it is missing or was changed, StoreError if it cannot be read."""
        try:
            data = self.path(kind, content_hash).read_bytes()
        except OSError as error:
            lost = DamagedFileError if isinstance(error, FileNotFoundError) else StoreError
            raise lost(f"cannot read {kind} file {content_hash[:16]} in {self.root}: {error.strerror}") from error
        if blake3(data).hexdigest() != content_hash:
            raise DamagedFileError(f"{kind} file {content_hash[:16]} in {self.root} was changed on disk")
        return data

    def remove(self, kind: str, content_hash: str) -> None:
        """Remove a file that nothing refers to, if it exists."""
        with _named_errors(self.root):
            self.path(kind, content_hash).unlink(missing_ok=True)

    def path(self, kind: str, content_hash: str) -> Path:
        if not HASH.fullmatch(content_hash):
            raise StoreError(f"{content_hash!r} is not a content hash")
        return self.root / kind / f"{content_hash}.parquet"


class IncomingFile:
    """An incomplete file in the store's folder, without its final name yet."""

    def __init__(self, store: Folder, kind: str) -> None:
        self._store, self._kind = store, kind
        with _named_errors(store.root):
            self._file = NewFile(store.root / kind / secrets.token_hex(16))
        self._size_bytes = 0
        self._hash = blake3()

    def write(self, piece: bytes) -> None:
        with _named_errors(self._store.root):
            self._file.write(self._size_bytes, piece)
        self._size_bytes += len(piece)
        self._hash.update(piece)

    @property
    def content_hash(self) -> str:
        """The hash of the bytes written so far."""
        return self._hash.hexdigest()

    def commit(self) -> str:
        """Give the file its final name, durably, and return its hash."""
        content_hash = self.content_hash
        path = self._store.path(self._kind, content_hash)
        if not path.exists():
            self._file.path = path
            with _named_errors(self._store.root):
                self._file.commit()
        return content_hash

    def close(self) -> None:
        self._file.close()


@contextmanager
def _named_errors(root: Path) -> Iterator[None]:
    """Turn OSErrors into StoreErrors. Use it only around file operations: other OSErrors are not the store's fault."""
    try:
        yield
    except OSError as error:
        next_step = "free space there" if error.errno in FULL else "make it a folder that this process may write"
        raise StoreError(f"cannot store a file in {root}: {error.strerror}; {next_step}") from error
