"""One version while it is being fetched: the files at full size, filled shard by shard, in any order.

    cache/.v000007.partial/files/...        preallocated
    cache/.v000007.partial/manifest.json    what is being fetched
    cache/.v000007.partial/done             one line per shard that was verified

Invariant: the files get the name `cache/v000007` only after every shard matched, and then the whole did, read
back from the files. What a killed client left is taken up again, each recorded shard after a new look at its
hash.
Called by the client, under the cache's lock.
Left out: applying deltas.
Paper: INTELLECT-2, SHARDCAST: the assembled checkpoint is compared with the SHA-256 of the origin (here
blake3).
"""

from __future__ import annotations

import errno
import os
import shutil
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

from blake3 import blake3

from .failover import FetchError
from .manifest import Manifest, ShardEntry, SignedManifest
from .store import CHUNK_BYTES, discard, fsync, version_name, write_all, write_file


class Partial:
    """Raises FetchError, naming the folder, whenever the disk refuses."""

    def __init__(self, cache: Path, signed: SignedManifest, manifest: Manifest) -> None:
        self.cache, self.manifest, self._signed = cache, manifest, signed
        self.folder = cache / f".{version_name(manifest.version)}.partial"
        self.files = [self.folder / "files" / file.path for file in manifest.files]
        self._ends = list(accumulate(file.size_bytes for file in manifest.files))
        self._done: set[int] = set()
        with disk_errors(self.folder):
            if not self._resume():
                self._start()

    def missing(self) -> list[ShardEntry]:
        return [shard for shard in self.manifest.shards if shard.index not in self._done]

    def write(self, shard: ShardEntry, offset_bytes: int, data: bytes) -> None:
        """Writes bytes of a shard, unverified yet."""
        with disk_errors(self.folder):
            view, position = memoryview(data), self._position(shard) + offset_bytes
            for path, at_bytes, size_bytes in self._ranges(position, len(data)):
                fd = os.open(
                    path, os.O_WRONLY
                )  # opened per write: a folder may have more files than a process may open
                try:
                    write_all(fd, view[:size_bytes], at_bytes)
                finally:
                    os.close(fd)
                view = view[size_bytes:]

    def mark_done(self, shard: ShardEntry) -> None:
        with disk_errors(self.folder), (self.folder / "done").open("a") as record:
            record.write(f"{shard.index}\n")
        self._done.add(shard.index)

    def verify(self) -> None:
        """Reads all back. Raises FetchError, and forgets the files, if they are not the published ones."""
        with disk_errors(self.folder):
            sizes = [path.stat().st_size for path in self.files]
            if sizes == [file.size_bytes for file in self.manifest.files] and self._whole_matches():
                return
            discard(self.folder)
        raise FetchError(
            f"version {self.manifest.version} in {self.folder} does not match its manifest though every "
            "shard did: this machine's disk or memory is at fault; what was fetched is dropped, fetch again"
        )

    def commit(self) -> Path:
        """Gives the verified files their final name. The signed manifest goes beside the folder."""
        final = self.cache / version_name(self.manifest.version)
        with disk_errors(self.folder):
            for path in self.files:
                fsync(path)
            folders = {parent for path in self.files for parent in path.parents}
            for folder in folders:
                if folder.is_relative_to(self.folder):
                    fsync(folder)
            discard(final)
            write_file(final.with_name(final.name + ".manifest.json"), self._signed.to_bytes())
            (self.folder / "files").rename(final)
            fsync(self.cache)
            shutil.rmtree(self.folder)
        return final

    def _start(self) -> None:
        discard(self.folder)
        self.folder.mkdir(parents=True)
        try:
            for path, file in zip(self.files, self.manifest.files, strict=True):
                path.parent.mkdir(parents=True, exist_ok=True)
                _allocate(path, file.size_bytes)
        except OSError:
            discard(self.folder)  # an empty reservation is of no use to anyone
            raise
        write_file(self.folder / "manifest.json", self._signed.to_bytes())

    def _resume(self) -> bool:
        """Takes up what an earlier process left of this very manifest, which is written after the files."""
        try:
            if (self.folder / "manifest.json").read_bytes() != self._signed.to_bytes():
                return False
            if [path.stat().st_size for path in self.files] != [file.size_bytes for file in self.manifest.files]:
                return False
            lines = (self.folder / "done").read_text().split("\n")[:-1]
        except FileNotFoundError:
            return False
        recorded = {int(line) for line in lines if line.isdecimal()}
        self._done = {s.index for s in self.manifest.shards if s.index in recorded and self._shard_matches(s)}
        return True

    def _shard_matches(self, shard: ShardEntry) -> bool:
        return self._hash(self._position(shard), shard.size_bytes) == shard.hash

    def _whole_matches(self) -> bool:
        return self._hash(0, self.manifest.size_bytes) == self.manifest.hash

    def _hash(self, position: int, size_bytes: int) -> str:
        digest, buffer = blake3(), memoryview(bytearray(CHUNK_BYTES))
        for path, at_bytes, left_bytes in self._ranges(position, size_bytes):
            with path.open("rb", buffering=0) as file:
                file.seek(at_bytes)
                while left_bytes and (got_bytes := file.readinto(buffer[:left_bytes])):
                    digest.update(buffer[:got_bytes])
                    left_bytes -= got_bytes
        return digest.hexdigest()

    def _position(self, shard: ShardEntry) -> int:
        return shard.index * self.manifest.shard_size_bytes

    def _ranges(self, position: int, size_bytes: int) -> Iterator[tuple[Path, int, int]]:
        """(file, offset in it, size) for a range of the concatenated files, in order."""
        index = bisect_right(self._ends, position)
        while size_bytes:
            start = self._ends[index] - self.manifest.files[index].size_bytes
            here_bytes = min(self._ends[index] - position, size_bytes)
            if here_bytes:
                yield self.files[index], position - start, here_bytes
            position, size_bytes, index = position + here_bytes, size_bytes - here_bytes, index + 1


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FetchError(
                f"no space left for {folder}: free some and fetch again; the shards that are done are kept"
            ) from error
        raise FetchError(f"cannot write {folder}: {error}") from error


def _allocate(path: Path, size_bytes: int) -> None:
    """Claims the space now, so that a full disk is noticed before the download and not at its end."""
    with path.open("wb") as file:
        if size_bytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        file.truncate(size_bytes)
