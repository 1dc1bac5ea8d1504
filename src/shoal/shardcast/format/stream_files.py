"""Files in a folder, read as the one byte string that a `Stream` cuts into shards.

Called by fetch, to write and verify downloads, and by publish, to verify the parent of a delta.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from blake3 import blake3

from shoal.files import CHUNK_BYTES
from shoal.shardcast.format.manifest import FileEntry, Stream


class StreamFiles:
    """The files' bytes, concatenated in listed order."""

    def __init__(self, folder: Path, files: Sequence[FileEntry]) -> None:
        self.paths = [folder / file.path for file in files]
        self.sizes_bytes = [file.size_bytes for file in files]
        self._ends = list(accumulate(self.sizes_bytes))

    def ranges(self, position: int, size_bytes: int) -> Iterator[tuple[Path, int, int]]:
        """(file, offset in the file, size) for each file in a range of the byte string, in order."""
        index = bisect_right(self._ends, position)
        while size_bytes:
            start = self._ends[index] - self.sizes_bytes[index]
            here_bytes = min(self._ends[index] - position, size_bytes)
            if here_bytes:
                yield self.paths[index], position - start, here_bytes
            position, size_bytes, index = position + here_bytes, size_bytes - here_bytes, index + 1

    def read(self, position: int, size_bytes: int) -> Iterator[bytes]:
        for path, at_bytes, left_bytes in self.ranges(position, size_bytes):
            with path.open("rb", buffering=0) as file:
                file.seek(at_bytes)
                while left_bytes and (data := file.read(min(left_bytes, CHUNK_BYTES))):
                    yield data
                    left_bytes -= len(data)

    def match(self, stream: Stream) -> bool:
        """Reads all files and compares them with the stream's hashes."""
        size_bytes = stream.shard_size_bytes
        return self.sizes_match() and all(
            self._hash(shard.index * size_bytes, shard.size_bytes) == shard.hash for shard in stream.entries()
        )

    def sizes_match(self) -> bool:
        try:
            return [path.stat().st_size for path in self.paths] == self.sizes_bytes
        except FileNotFoundError:
            return False

    def stamps(self) -> tuple[tuple[int, int, int], ...]:
        """Inode, size and modification time of each file: the same again if nobody has written to it.
        Raises FileNotFoundError."""
        stats = [path.stat() for path in self.paths]
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)

    def _hash(self, position: int, size_bytes: int) -> str:
        digest = blake3()
        for data in self.read(position, size_bytes):
            digest.update(data)
        return digest.hexdigest()


class Hashing:
    """The hashes of the shards of a byte string that passes by."""

    def __init__(self, shard_size_bytes: int) -> None:
        self.shard_size_bytes = shard_size_bytes
        self._hashes: list[str] = []
        self._hash, self._size_bytes = blake3(), 0

    def add(self, data: memoryview) -> None:
        while data:
            piece = data[: self.shard_size_bytes - self._size_bytes]
            data = data[len(piece) :]
            self._hash.update(piece)
            self._size_bytes += len(piece)
            if self._size_bytes == self.shard_size_bytes:
                self._next()

    def finish(self) -> list[str]:
        if self._size_bytes:
            self._next()
        return self._hashes

    def _next(self) -> None:
        self._hashes.append(self._hash.hexdigest())
        self._hash, self._size_bytes = blake3(), 0
