"""Encode and apply the exact difference between two versions of a model folder.

In one RL step at most a few per cent of the bf16 words change. If a safetensors file has the same header in both
versions, only the changed words of each tensor are encoded. Any other file is marked as unchanged or sent whole.

    delta    MAGIC, then one kind for each file of the new version, then a body for each file that is not SAME
    body     TENSORS: the blake3 hash of the safetensors header, then all pieces of all tensors
             WHOLE: all pieces of the file, each as words of one byte, without a kind
    piece    a kind, then the data for at most PIECE_WORDS words of one tensor
             SAME: nothing     WHOLE: the new words
             CHANGES: the number of changed words, a gap for each (as words of four bytes), a step for each (as words)
    words    the lowest byte of every word (a plane), then the second byte of every word, and so on
    plane    a length, followed by that many bytes
             length 0: all bytes are zero     length = number of words: raw bytes     otherwise: a zstd frame

A gap is the number of unchanged words directly before a changed word. A step is the new word minus the old word: an
integer with wrap-around in zigzag coding (0, -1, 1, -2 become 0, 1, 2, 3). It is often one unit in the last place.
Numbers and lengths have four bytes, kinds have one. All are little-endian.

Invariant: paths, sizes and headers come from the caller and the old version, never from the delta. No length in a delta
can make the reader allocate more memory than these sizes require. A malformed delta causes DeltaError or wrong words.
So the caller must verify the files that `apply` writes against the manifest. `encode` reads each new file once, or
twice if the file is SAME. `apply` reads and writes each file once for each run of deltas (see `passes`).
Left out: merging the deltas of several versions into one (readers fetch all of them), renamed files (sent whole), and
grouping words by exponent, which makes smaller deltas but takes more CPU time.
Source: docs/shardcast.md has the measurements, and benchmarks/weights/deltas.py compares encodings. The INTELLECT-2
paper sends whole checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from shoal.files import CHUNK_BYTES
from shoal.shardcast.files import LayoutError, StoredTensor, as_one_tensor, read_layout

MAGIC = b"shoal delta 1\n"
PIECE_WORDS = 1 << 20
ZSTD_LEVEL = 1

Words = NDArray[np.unsignedinteger[Any]]
Places = NDArray[np.int64]


class DeltaError(Exception):
    """This delta cannot be applied; the message says why."""


class Kind(IntEnum):
    SAME, WHOLE, TENSORS, CHANGES = range(4)


class Writer:
    def __init__(self, sink: Callable[[bytes], None]) -> None:
        self.write = sink
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)

    def words(self, words: Words) -> None:
        self.write(self._packed(words))

    def piece(self, old: Words, new: Words) -> None:
        places_K = np.flatnonzero(old != new)
        if not len(places_K):
            self.write(bytes([Kind.SAME]))
            return
        gaps_K = (np.diff(places_K, prepend=-1) - 1).astype("<u4")
        steps_K = _zigzag(new[places_K] - old[places_K])
        packed = bytes([Kind.CHANGES]) + _number(len(places_K)) + self._packed(gaps_K) + self._packed(steps_K)
        # If the changes take less, do not try whole words: they are hardly ever smaller, and compressing them is slow.
        if len(packed) > new.nbytes // 4:
            packed = min(packed, bytes([Kind.WHOLE]) + self._packed(new), key=len)
        self.write(packed)

    def _packed(self, words: Words) -> bytes:
        planes = words.view(np.uint8).reshape(len(words), words.itemsize).T
        return b"".join(self._plane(plane) for plane in planes)

    def _plane(self, plane: NDArray[np.uint8]) -> bytes:
        if not plane.any():
            return _number(0)
        data = plane.tobytes()
        data = min(data, self._compressor.compress(data), key=len)
        return _number(len(data)) + data


class Reader:
    """Read a delta sequentially. Every method raises DeltaError for malformed bytes."""

    def __init__(self, file: BinaryIO, files: int) -> None:
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor()
        if self.take(len(MAGIC)) != MAGIC:
            raise DeltaError("the file is not a delta, or its format version is unknown")
        self.file_kinds = [_kind_of(number, Kind.SAME, Kind.WHOLE, Kind.TENSORS) for number in self.take(files)]

    def take(self, size_bytes: int) -> bytes:
        data = self._file.read(size_bytes)
        if len(data) != size_bytes:
            raise DeltaError(f"the delta is truncated at byte {self._file.tell()}")
        return data

    def piece_kind(self) -> Kind:
        return _kind_of(self.take(1)[0], Kind.SAME, Kind.WHOLE, Kind.CHANGES)

    def changes(self, words: int, word_bytes: int) -> tuple[Places, Words]:
        """Read a piece of kind CHANGES. Return the ascending positions of changed words, and the steps to add."""
        count = self._number()
        if not 0 < count <= words:
            raise DeltaError(f"the delta claims {count} changes in {words} words")
        places_K = np.cumsum(self.words(count, 4) + np.int64(1)) - 1
        if places_K[-1] >= words:
            raise DeltaError(f"the delta claims a change at word {places_K[-1]} of {words}, counted from 0")
        return places_K, _unzigzag(self.words(count, word_bytes))

    def words(self, count: int, word_bytes: int) -> Words:
        bytes_KB = np.zeros((count, word_bytes), np.uint8)
        for plane in range(word_bytes):
            if size_bytes := self._number():
                bytes_KB[:, plane] = np.frombuffer(self._plane(size_bytes, count), np.uint8)
        return bytes_KB.reshape(-1).view(f"<u{word_bytes}")

    def end(self) -> None:
        if self._file.read(1):
            raise DeltaError("the delta has extra bytes after its last file")

    def _plane(self, size_bytes: int, raw_bytes: int) -> bytes:
        if size_bytes > raw_bytes:
            raise DeltaError(f"a plane of {raw_bytes} bytes takes {size_bytes} bytes in the delta")
        data = self.take(size_bytes)
        if size_bytes == raw_bytes:
            return data
        try:
            # Check before decompressing, which allocates the size that the frame claims.
            if zstandard.frame_content_size(data) != raw_bytes:
                raise DeltaError(f"a zstd frame does not have the {raw_bytes} bytes of its plane")
            return self._decompressor.decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise DeltaError(f"a plane is not a zstd frame: {error}") from error

    def _number(self) -> int:
        return int.from_bytes(self.take(4), "little")


def _kind_of(number: int, *allowed: Kind) -> Kind:
    if number not in allowed:
        raise DeltaError(f"kind {number}, expected one of {', '.join(f'{kind} ({kind.name})' for kind in allowed)}")
    return Kind(number)


def _number(number: int) -> bytes:
    return number.to_bytes(4, "little")


def _zigzag(differences: Words) -> Words:
    signed = differences.view(f"<i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(differences.dtype)


def _unzigzag(numbers: Words) -> Words:
    differences: Words = np.bitwise_xor(numbers >> 1, np.negative(numbers & 1))
    return differences


@dataclass(frozen=True)
class Link:
    """A delta on disk, and the paths and sizes of the files that it produces, in the order in which it encodes them."""

    delta: Path
    files: tuple[tuple[str, int], ...]


def encode(
    old: Path,
    new: Path,
    files: Sequence[str],
    sink: Callable[[bytes], None],
    on_read: Callable[[memoryview], None] = lambda data: None,
) -> None:
    """Encode the delta from folder `old` to folder `new` into `sink`. `files` are the paths in `new`. Pass all bytes of
    these files to `on_read`, in order, so that the caller can hash them without reading them again.
    Raise OSError, and DeltaError if a file is truncated while it is read."""
    writer = Writer(sink)
    kinds = [_kind(old / path, new / path) for path in files]
    writer.write(MAGIC + bytes(kinds))
    for path, kind in zip(files, kinds, strict=True):
        with (new / path).open("rb") as after:
            if kind is Kind.TENSORS:
                layout = read_layout(new / path)
                writer.write(blake3(layout.header).digest())
                on_read(memoryview(layout.header))
                with (old / path).open("rb") as before:
                    for piece in pieces(*layout.tensors):
                        words = _read(after, piece)
                        on_read(_bytes(words))
                        writer.piece(_read(before, piece), words)
                continue
            for piece in pieces(as_one_tensor(path, (new / path).stat().st_size)):
                words = _read(after, piece)
                on_read(_bytes(words))
                if kind is Kind.WHOLE:
                    writer.words(words)


def passes(chain: Iterable[Link]) -> list[list[Link]]:
    """Split a chain of deltas into runs that `apply` can merge. All deltas of a run produce files of the same names and
    sizes. No file is WHOLE in one delta of the run and TENSORS in another. Raise DeltaError."""
    runs: list[list[Link]] = []
    kinds: list[Kind] = []  # the kind of each file, combined over the deltas of the last run
    for link in chain:
        with link.delta.open("rb") as file:
            file_kinds = Reader(file, len(link.files)).file_kinds
        if runs and runs[-1][0].files == link.files and all(map(_compatible, kinds, file_kinds)):
            runs[-1].append(link)
            kinds = list(map(max, kinds, file_kinds))  # SAME is the smallest kind, so any other replaces it
        else:
            runs.append([link])
            kinds = file_kinds
    return runs


def apply(
    old: Path, run: Sequence[Link], out: Path, on_write: Callable[[memoryview], None] = lambda data: None
) -> None:
    """Apply `run` (one delta, or a run from `passes`) to the folder `old`, and write the result into another folder,
    `out`. Pass all bytes of the new files to `on_write`, in the order of the files in the delta, so that the caller can
    verify them without reading them.

    Raise DeltaError, and OSError from the disk. The files in `out` are then incomplete.
    """
    files = run[-1].files
    with ExitStack() as stack:
        readers = [Reader(stack.enter_context(link.delta.open("rb")), len(files)) for link in run]
        for place, (path, size_bytes) in enumerate(files):
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            kinds = [reader.file_kinds[place] for reader in readers]
            changing = [reader for reader, kind in zip(readers, kinds, strict=True) if kind is not Kind.SAME]
            with _TeeFile(out / path, on_write) as target:
                if Kind.WHOLE in kinds:
                    for piece in pieces(as_one_tensor(path, size_bytes)):
                        *_, words = (reader.words(piece.words, 1) for reader in changing)
                        target.write(words.data)
                    continue
                with _old_file(old / path, size_bytes) as source:
                    if changing:
                        _write_changed(changing, source, target)
                    _copy(source, target, size_bytes)
        for reader in readers:
            reader.end()


def _compatible(kind: Kind, other: Kind) -> bool:
    return kind is other or Kind.SAME in (kind, other)


def _kind(old: Path, new: Path) -> Kind:
    if not old.is_file():
        return Kind.WHOLE
    try:
        if read_layout(old).header == read_layout(new).header:
            return Kind.TENSORS
    except LayoutError:
        pass
    return Kind.SAME if _equal(old, new) else Kind.WHOLE


def _equal(old: Path, new: Path) -> bool:
    if old.stat().st_size != new.stat().st_size:
        return False
    with old.open("rb") as before, new.open("rb") as after:
        while data := before.read(CHUNK_BYTES):
            if data != after.read(CHUNK_BYTES):
                return False
    return True


class _TeeFile:
    """A file that is written sequentially and passes all its bytes to a callback."""

    def __init__(self, path: Path, on_write: Callable[[memoryview], None]) -> None:
        self._file = path.open("wb")
        self._on_write = on_write

    def __enter__(self) -> _TeeFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def tell(self) -> int:
        return self._file.tell()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._on_write(view)
        return len(view)


def _write_changed(readers: Sequence[Reader], source: BufferedReader, target: _TeeFile) -> None:
    """Write a tensor file up to the end of its last changed piece. Each reader has the changes of one version."""
    try:
        layout = read_layout(Path(source.name))
    except LayoutError as error:
        raise DeltaError(f"the delta was made against another version: {error}") from error
    header_hash = blake3(layout.header).digest()
    if any(reader.take(len(header_hash)) != header_hash for reader in readers):
        raise DeltaError(f"the delta was made against another version: the header of {source.name} differs")
    for piece in pieces(*layout.tensors):
        words: Words | None = None  # None while no delta has changed this piece
        for reader in readers:
            kind = reader.piece_kind()
            if kind is Kind.WHOLE:
                words = reader.words(piece.words, piece.word_bytes)
            elif kind is Kind.CHANGES:
                words = _read(source, piece) if words is None else words
                places_K, steps_K = reader.changes(piece.words, piece.word_bytes)
                words[places_K] += steps_K
        if words is not None:
            _copy(source, target, piece.offset_bytes)
            target.write(words.data)


def pieces(*tensors: StoredTensor) -> Iterator[StoredTensor]:
    """Cut the tensors, in file order, into pieces of at most PIECE_WORDS words."""
    for tensor in tensors:
        for start in range(0, tensor.words, PIECE_WORDS):
            offset_bytes = tensor.offset_bytes + start * tensor.word_bytes
            yield replace(tensor, offset_bytes=offset_bytes, words=min(PIECE_WORDS, tensor.words - start))


@contextmanager
def _old_file(path: Path, size_bytes: int) -> Iterator[BufferedReader]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise DeltaError(f"the delta was made against another version: {error}") from error
    with file:
        if (actual_bytes := path.stat().st_size) != size_bytes:
            raise DeltaError(
                f"the delta was made against another version: {path} has {actual_bytes} bytes, expected {size_bytes}"
            )
        yield file


def _read(file: BufferedReader, piece: StoredTensor) -> Words:
    words: Words = np.empty(piece.words, f"<u{piece.word_bytes}")
    file.seek(piece.offset_bytes)
    if file.readinto(words.data) != words.nbytes:
        raise DeltaError(f"{file.name} became shorter while it was read")
    return words


def _bytes(words: Words) -> memoryview:
    return words.data.cast("B") if len(words) else memoryview(b"")


def _copy(source: BufferedReader, target: _TeeFile, end_bytes: int) -> None:
    """Copy `source` to `target`, from the end of `target` to `end_bytes`."""
    at_bytes = target.tell()
    source.seek(at_bytes)
    while at_bytes < end_bytes:
        data = source.read(min(end_bytes - at_bytes, CHUNK_BYTES))
        if not data:
            raise DeltaError(f"{source.name} became shorter while it was read")
        at_bytes += target.write(data)
