"""Cuts a byte string into shards as it arrives: computes their hashes and, if asked, writes their files.

Called by the origin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from blake3 import blake3

from shoal.files import NewFile
from shoal.shardcast.format.manifest import MAX_SHARDS, MAX_SIZE_BYTES, Stream
from shoal.shardcast.publish.contents import PublishError


class Cutter:
    """Takes a byte string in pieces and hashes its shards. With `create`, writes each shard to the file it returns."""

    def __init__(self, shard_size_bytes: int, create: Callable[[int], NewFile] | None) -> None:
        self.shard_size_bytes = shard_size_bytes
        self.create = create
        self.shards: list[str] = []
        self.taken_bytes = 0
        self._file: NewFile | None = None
        self._hash, self._size_bytes = blake3(), 0

    def add(self, data: memoryview) -> None:
        self.taken_bytes += len(data)
        while data:
            piece = data[: self.shard_size_bytes - self._size_bytes]
            data = data[len(piece) :]
            if self.create and self._file is None:
                self._file = self.create(len(self.shards))
            if self._file:
                self._file.write(self._size_bytes, piece)
            self._hash.update(piece)
            self._size_bytes += len(piece)
            if self._size_bytes == self.shard_size_bytes:
                self._finish_shard()

    def finish(self) -> None:
        if self._size_bytes:
            self._finish_shard()

    def _finish_shard(self) -> None:
        if self._file:
            self._file.commit(durable=False)
            self.close()
        self.shards.append(self._hash.hexdigest())
        self._hash, self._size_bytes = blake3(), 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def cut(
    chunks: Iterable[memoryview], size_bytes: int, shard_size_bytes: int, create: Callable[[int], NewFile] | None
) -> Stream:
    """The stream of a complete byte string of `size_bytes`."""
    cutter = Cutter(shard_size_bytes, create)
    try:
        for chunk in chunks:
            cutter.add(chunk)
        cutter.finish()
    finally:
        cutter.close()
    return Stream(size_bytes=size_bytes, shard_size_bytes=shard_size_bytes, shards=tuple(cutter.shards))


def shard_bytes(size_bytes: int, wanted_bytes: int | None) -> int:
    """The size of a stream's shards. None wanted: small enough to spread a version over many connections, large enough to
    make requests cheap. Raises PublishError if the stream is too long, or its shards too many."""
    unit = 64 << 10
    found = wanted_bytes or min(max(-(-size_bytes // (256 * unit)) * unit, unit), 16 << 20)
    if size_bytes > MAX_SIZE_BYTES:
        raise PublishError(f"a version of {size_bytes} bytes is larger than {MAX_SIZE_BYTES}; publish it in parts")
    if (shards := -(-size_bytes // found)) > MAX_SHARDS:
        raise PublishError(
            f"{size_bytes} bytes make {shards} shards of {found}, and a version has at most {MAX_SHARDS}; "
            f"raise the shard size to {-(-size_bytes // MAX_SHARDS)} bytes or more"
        )
    return found
