"""A folder of immutable, content-addressed files: the default store.

Invariant: a name is the BLAKE3 of the content, and once there holds all of it (temporary name, fsync, rename).
Called by the coordinator, which serves it over HTTP. Left out: an S3 bucket behind the same two methods.
"""

import errno
import os
import re
import tempfile
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from shoal.errors import ShoalError
from shoal.files import fsync

HASH = re.compile(r"[0-9a-f]{64}")
FULL = {errno.ENOSPC, errno.EDQUOT}


class StoreError(ShoalError):
    """A file that cannot be stored or found; the message names it and the next step."""


class Store(Protocol):
    def put(self, kind: str, data: bytes) -> str:
        """Keep `data`; returns its hash. Storing the same bytes again changes nothing."""
        ...

    def get(self, kind: str, content_hash: str) -> bytes: ...


class Folder:
    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, kind: str, data: bytes) -> str:
        content_hash = blake3(data).hexdigest()
        path = self._path(kind, content_hash)
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                _write_whole(path, data)
        except OSError as error:
            next_step = "free space there" if error.errno in FULL else "see that it is a folder this process may write"
            raise StoreError(f"cannot store a file in {self.root}: {error.strerror}; {next_step}") from error
        return content_hash

    def get(self, kind: str, content_hash: str) -> bytes:
        try:
            data = self._path(kind, content_hash).read_bytes()
        except OSError as error:
            raise StoreError(f"cannot read {kind} file {content_hash[:16]} in {self.root}: {error.strerror}") from error
        if blake3(data).hexdigest() != content_hash:
            raise StoreError(f"{kind} file {content_hash[:16]} in {self.root} was changed on disk")
        return data

    def _path(self, kind: str, content_hash: str) -> Path:
        if not HASH.fullmatch(content_hash):
            raise StoreError(f"{content_hash!r} is no content hash")
        return self.root / kind / f"{content_hash}.parquet"


def _write_whole(path: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".put-")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # what did not fit must not fill the disk
    fsync(path.parent)  # or a power cut may undo the rename of a file that was already promised
