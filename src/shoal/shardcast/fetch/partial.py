"""A stream while it is being fetched: files of full size, filled shard by shard in any order.

    .v000007.full/files/...      preallocated
    .v000007.full/layout         sizes of the files and of a shard
    .v000007.full/record         lines "index bytes": how much of a shard was written

Invariant: after a restart nothing here is trusted: each recorded byte is hashed again before it counts.
Called by the client, under the cache's lock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.files import discard, write_all, write_file
from shoal.shardcast.fetch.errors import disk_errors
from shoal.shardcast.format.manifest import FileEntry, ShardEntry
from shoal.shardcast.format.stream_files import StreamFiles

RECORD_EVERY_BYTES = 1 << 20


class Partial:
    """Every method raises FetchError, with the folder's name, when the disk fails."""

    def __init__(self, folder: Path, files: Sequence[FileEntry], shard_size_bytes: int) -> None:
        self.folder, self.entries, self.shard_size_bytes = folder, list(files), shard_size_bytes
        self.layout = StreamFiles(folder / "files", files)
        self._recorded: dict[int, int] = {}
        with disk_errors(folder):
            if not self._resume():
                self._start()

    @property
    def files(self) -> Path:
        return self.folder / "files"

    def sink(self, shard: ShardEntry) -> PartialShard:
        return PartialShard(self, shard)

    def recorded_bytes(self, shard: ShardEntry) -> int:
        return min(self._recorded.get(shard.index, 0), shard.size_bytes)

    def record(self, shard: ShardEntry, size_bytes: int) -> None:
        with disk_errors(self.folder), (self.folder / "record").open("a") as record:
            record.write(f"{shard.index} {size_bytes}\n")
        self._recorded[shard.index] = size_bytes

    def _start(self) -> None:
        discard(self.folder)
        self.folder.mkdir(parents=True)
        try:
            for file in self.entries:
                path = self.files / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                _allocate(path, file.size_bytes)
        except OSError:
            discard(self.folder)  # free the space that was reserved
            raise
        write_file(self.folder / "layout", self._description())

    def _resume(self) -> bool:
        """Loads what an earlier process left, if it was for the same files. The layout is written after the files."""
        try:
            if (self.folder / "layout").read_bytes() != self._description():
                return False
            if not self.layout.sizes_match():
                return False
            lines = (self.folder / "record").read_text().split("\n")[:-1]
        except FileNotFoundError:
            return False
        for line in lines:
            index, _, size_bytes = line.partition(" ")
            if index.isdecimal() and size_bytes.isdecimal():
                self._recorded[int(index)] = int(size_bytes)
        return True

    def _description(self) -> bytes:
        return json.dumps([self.shard_size_bytes, [[f.path, f.size_bytes] for f in self.entries]]).encode()


class PartialShard:
    """Stores one shard: see `download.ShardSink`."""

    def __init__(self, partial: Partial, shard: ShardEntry) -> None:
        self.partial, self.shard = partial, shard
        self._at_bytes = shard.index * partial.shard_size_bytes
        self._size_bytes = 0
        self._since_record_bytes = 0
        self._open: tuple[Path, int] | None = (
            None  # one at a time: a version may have more files than a process may open
        )

    def begun(self) -> Iterator[bytes]:
        with disk_errors(self.partial.folder):
            yield from self.partial.layout.read(self._at_bytes, self.partial.recorded_bytes(self.shard))

    def write(self, offset_bytes: int, data: bytes) -> None:
        with disk_errors(self.partial.folder):
            view = memoryview(data)
            for path, at_bytes, size_bytes in self.partial.layout.ranges(self._at_bytes + offset_bytes, len(data)):
                write_all(self._file(path), view[:size_bytes], at_bytes)
                view = view[size_bytes:]
            self._size_bytes = offset_bytes + len(data)
            self._since_record_bytes += len(data)
            if self._since_record_bytes >= RECORD_EVERY_BYTES:
                self._record(self._size_bytes)

    def restart(self) -> None:
        self._size_bytes = 0
        self._record(0)

    def done(self) -> None:
        self._record(self.shard.size_bytes)

    def close(self) -> None:
        if self._open:
            os.close(self._open[1])
            self._open = None
        if self._since_record_bytes:
            self._record(self._size_bytes)

    def _file(self, path: Path) -> int:
        if self._open is None or self._open[0] != path:
            if self._open:
                os.close(self._open[1])
            self._open = path, os.open(path, os.O_WRONLY)
        return self._open[1]

    def _record(self, size_bytes: int) -> None:
        self.partial.record(self.shard, size_bytes)
        self._since_record_bytes = 0


def _allocate(path: Path, size_bytes: int) -> None:
    """Reserves the space now, so that a full disk is noticed before the download and not at its end."""
    with path.open("wb") as file:
        if size_bytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        file.truncate(size_bytes)
