"""A folder of immutable, content-addressed files: the default store.

Invariant: a file's name is the BLAKE3 of its content, and a file under its name is complete (temporary name, fsync, rename).
Called by the coordinator, which serves it over HTTP. Left out: an S3 bucket behind the same two methods.
"""

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from shoal.errors import ShoalError
from shoal.files import fsync, remove_leftovers

HASH = re.compile(r"[0-9a-f]{64}")
FULL = {errno.ENOSPC, errno.EDQUOT}


class StoreError(ShoalError):
    """A file that cannot be stored or found; the message names it and the next step."""


class Store(Protocol):
    def receive(self, kind: str) -> AbstractContextManager["Incoming"]:
        """A file that arrives in pieces. Without `commit`, nothing of it is kept."""
        ...

    def get(self, kind: str, content_hash: str) -> bytes: ...


class Incoming(Protocol):
    def write(self, piece: bytes) -> None: ...

    def commit(self) -> str:
        """Keep the file; returns its hash. Storing the same bytes again changes nothing."""
        ...


class Folder:
    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, kind: str, data: bytes) -> str:
        """Store a file that is in memory; returns its hash."""
        with self.receive(kind) as incoming:
            incoming.write(data)
            return incoming.commit()

    @contextmanager
    def receive(self, kind: str) -> Iterator["IncomingFile"]:
        incoming = None
        try:
            incoming = IncomingFile(self, kind)
            yield incoming
        except OSError as error:
            next_step = "free space there" if error.errno in FULL else "see that it is a folder this process may write"
            raise StoreError(f"cannot store a file in {self.root}: {error.strerror}; {next_step}") from error
        finally:
            if incoming is not None:
                incoming.close()

    def clean(self) -> None:
        """Remove the unfinished files of a process that was killed."""
        for kind in self.root.glob("*/"):
            remove_leftovers(kind)

    def get(self, kind: str, content_hash: str) -> bytes:
        try:
            data = self.path(kind, content_hash).read_bytes()
        except OSError as error:
            raise StoreError(f"cannot read {kind} file {content_hash[:16]} in {self.root}: {error.strerror}") from error
        if blake3(data).hexdigest() != content_hash:
            raise StoreError(f"{kind} file {content_hash[:16]} in {self.root} was changed on disk")
        return data

    def path(self, kind: str, content_hash: str) -> Path:
        if not HASH.fullmatch(content_hash):
            raise StoreError(f"{content_hash!r} is no content hash")
        return self.root / kind / f"{content_hash}.parquet"


class IncomingFile:
    """A file in the store's folder that has no final name yet, because its content is not complete."""

    def __init__(self, store: Folder, kind: str) -> None:
        self._store, self._kind = store, kind
        folder = store.root / kind
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".put-", suffix=".tmp")
        self._temporary = Path(name)
        self._file = os.fdopen(descriptor, "wb")
        self._hash = blake3()

    def write(self, piece: bytes) -> None:
        self._hash.update(piece)
        self._file.write(piece)

    def commit(self) -> str:
        """Give the file its name, durably. Returns its hash."""
        content_hash = self._hash.hexdigest()
        path = self._store.path(self._kind, content_hash)
        if path.exists():
            return content_hash
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.replace(path)
        fsync(path.parent)  # a power cut could undo the rename of a file that was already promised
        return content_hash

    def close(self) -> None:
        with suppress(OSError):  # flushing again fails again where the disk is full; `commit` has reported it
            self._file.close()
        self._temporary.unlink(missing_ok=True)
