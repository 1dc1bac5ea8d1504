"""A version's files: where safetensors files store their tensors, and how the concatenated files are cut into shards.

Invariant: the tensors of a `Layout` fill the file without gaps, from the end of the header to the end of the file. Each
tensor holds a whole number of words (numbers of 1, 2 or 4 bytes). A `Cutter` hashes each byte once.
Left out: words of other widths (such tensors are treated as bytes).
Source: the safetensors format: eight bytes of header length (little-endian), the header in JSON, the data.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeVar

from blake3 import blake3

from shoal.files import CHUNK_BYTES, NewFile
from shoal.shardcast.manifest import FileEntry, ShardEntry, Stream

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
WORD_BYTES = {"BF16": 2, "F16": 2, "F32": 4}  # the words of all other types have one byte


class LayoutError(ValueError):
    """A file is not valid safetensors, or changed while it was read."""


@dataclass(frozen=True)
class StoredTensor:
    name: str
    offset_bytes: int  # in the file
    words: int
    word_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.words * self.word_bytes


@dataclass(frozen=True)
class Layout:
    header: bytes  # everything before the data
    tensors: tuple[StoredTensor, ...]  # in file order


def as_one_tensor(name: str, size_bytes: int) -> StoredTensor:
    """Treat a file that is not safetensors as one tensor of bytes."""
    return StoredTensor(name, 0, size_bytes, 1)


def read_layout(path: Path) -> Layout:
    """Read the layout of a safetensors file. Raise LayoutError, and OSError from the disk."""
    with path.open("rb") as file:
        prefix = file.read(8)
        rest_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or rest_bytes > MAX_HEADER_BYTES or len(rest := file.read(rest_bytes)) < rest_bytes:
            raise LayoutError(f"{path.name} has no safetensors header")
        size_bytes = os.fstat(file.fileno()).st_size
    header = prefix + rest
    tensors = _tensors(header, path.name)
    edges = [(len(header), len(header)), *map(_place, tensors), (size_bytes, size_bytes)]
    if any(before[1] != after[0] for before, after in pairwise(edges)):
        raise LayoutError(f"the tensors of {path.name} leave gaps, overlap, or do not end where the file ends")
    return Layout(header, tuple(tensors))


def _tensors(header: bytes, name: str) -> list[StoredTensor]:
    """Parse the header. Return the tensors in file order."""
    try:
        entries = json.loads(header[8:])
        entries.pop("__metadata__", None)
        return sorted((_tensor(tensor, entry, len(header)) for tensor, entry in entries.items()), key=_place)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LayoutError(f"{name} has a malformed safetensors header: {error}") from error


def _tensor(name: str, entry: dict[str, object], start_bytes: int) -> StoredTensor:
    match entry["dtype"], entry["data_offsets"]:
        case str(dtype), [int(begin), int(end)] if 0 <= begin <= end:
            word_bytes = WORD_BYTES.get(dtype, 1)
            words, rest = divmod(end - begin, word_bytes)
            if not rest:
                return StoredTensor(name, start_bytes + begin, words, word_bytes)
    raise ValueError(f"tensor {name!r}")


def _place(tensor: StoredTensor) -> tuple[int, int]:
    return tensor.offset_bytes, tensor.end_bytes


class StreamFiles:
    """One byte string: the files of a version, concatenated in listed order."""

    def __init__(self, folder: Path, files: Sequence[FileEntry]) -> None:
        self.paths = [folder / file.path for file in files]
        self.sizes_bytes = [file.size_bytes for file in files]
        self._ends = list(accumulate(self.sizes_bytes))

    def ranges(self, position: int, size_bytes: int) -> Iterator[tuple[Path, int, int]]:
        """For each file in a range of the byte string, in order, yield (file, offset in the file, size)."""
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
        """Read all files and compare them with the stream's hashes."""
        return self.sizes_match() and next(self.missing(stream), None) is None

    def missing(self, stream: Stream) -> Iterator[ShardEntry]:
        """Read all files and yield the shards that do not match."""
        for shard in stream.entries():
            if self._hash(shard.index * stream.shard_size_bytes, shard.size_bytes) != shard.hash:
                yield shard

    def sizes_match(self) -> bool:
        try:
            return [path.stat().st_size for path in self.paths] == self.sizes_bytes
        except FileNotFoundError:
            return False

    def stamps(self) -> tuple[tuple[int, int, int], ...]:
        """Return inode, size and modification time of each file, which change when the file is written to.
        Raise FileNotFoundError."""
        stats = [path.stat() for path in self.paths]
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)

    def _hash(self, position: int, size_bytes: int) -> str:
        digest = blake3()
        for data in self.read(position, size_bytes):
            digest.update(data)
        return digest.hexdigest()


class Cutter:
    """Hash the shards of a byte string that comes in pieces. If `create` is given, also write each shard to the file
    that `create` returns for its index."""

    def __init__(self, shard_size_bytes: int, create: Callable[[int], NewFile] | None = None) -> None:
        self.shard_size_bytes = shard_size_bytes
        self.create = create
        self.shards: list[str] = []
        self.added_bytes = 0
        self._file: NewFile | None = None
        self._hash, self._size_bytes = blake3(), 0

    def add(self, data: memoryview) -> None:
        self.added_bytes += len(data)
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

    def finish(self, size_bytes: int) -> Stream:
        """Return the stream. Raise LayoutError unless it has `size_bytes`."""
        if self._size_bytes:
            self._finish_shard()
        if self.added_bytes != size_bytes:
            raise LayoutError(f"got {self.added_bytes} bytes, expected {size_bytes}")
        return Stream(size_bytes=size_bytes, shard_size_bytes=self.shard_size_bytes, shards=tuple(self.shards))

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
    """Cut a byte string of `size_bytes` into shards. Raise LayoutError if it has another length."""
    cutter = Cutter(shard_size_bytes, create)
    try:
        for chunk in chunks:
            cutter.add(chunk)
        return cutter.finish(size_bytes)
    finally:
        cutter.close()


T = TypeVar("T")


@contextmanager
def alongside(act: Callable[[T], None]) -> Iterator[Callable[[T], None]]:
    """Yield a function that runs `act` on its argument in another thread. The caller must not change the argument
    afterwards."""
    with ThreadPoolExecutor(1) as thread:
        running: list[Future[None]] = []

        def call(value: T) -> None:
            while running:
                running.pop().result()
            running.append(thread.submit(act, value))

        yield call
        while running:
            running.pop().result()
