"""The binary format of a delta.

    delta    MAGIC, one kind per file of the new version, then the bodies of the files that are not SAME
    file     TENSORS: blake3 of the safetensors header, the pieces of all its tensors     WHOLE: its bytes, in pieces
    piece    at most PIECE_WORDS words of one tensor, after a kind (not in a WHOLE file)
             SAME: nothing     WHOLE: the new words
             CHANGES: the number of changed words, a gap for each (words of four bytes), a step for each
    words    byte plane by byte plane, lowest first: length, bytes
             length 0: all zeros     the plane's size: raw bytes     less: a zstd frame

A gap is the number of unchanged words before a changed one, so positions ascend. A step is new minus old as integers,
modulo the word size, in zigzag coding (0, -1, 1, -2 as 0, 1, 2, 3). It is often one unit in the last place. Numbers have
four bytes, kinds have one; all are little-endian.

Invariant: the caller says how many words come next, and no length in the delta makes the reader allocate more. A
malformed delta ends in DeltaError, or in the requested number of wrong words.
Called by delta.py and inplace.py.
Left out: grouping words by exponent. It makes smaller deltas but takes more CPU time, which pays only on slow links
(benchmarks/deltas.py compares this and other encodings).
Source: none; the paper sends whole checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, BinaryIO

import numpy as np
import zstandard
from numpy.typing import NDArray

MAGIC = b"shoal delta 1\n"
PIECE_WORDS = 1 << 20
ZSTD_LEVEL = 1

Words = NDArray[np.unsignedinteger[Any]]
Places = NDArray[np.int64]


class DeltaError(Exception):
    """This delta cannot be applied, and why."""


class Kind(IntEnum):
    SAME, WHOLE, TENSORS, CHANGES = range(4)


class Writer:
    def __init__(self, sink: Callable[[bytes], None]) -> None:
        self.size_bytes = 0
        self._sink = sink
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)

    def write(self, data: bytes) -> None:
        self.size_bytes += len(data)
        self._sink(data)

    def words(self, words: Words) -> None:
        self.write(self._packed(words))

    def piece(self, old: Words, new: Words) -> int:
        """Returns the number of changed words."""
        places_K = np.flatnonzero(old != new)
        if not len(places_K):
            self.write(bytes([Kind.SAME]))
            return 0
        gaps_K = (np.diff(places_K, prepend=-1) - 1).astype("<u4")
        steps_K = _zigzag(new[places_K] - old[places_K])
        packed = bytes([Kind.CHANGES]) + _number(len(places_K)) + self._packed(gaps_K) + self._packed(steps_K)
        if len(packed) > new.nbytes // 4:  # below that, whole words are hardly ever smaller, and slow to compress
            packed = min(packed, bytes([Kind.WHOLE]) + self._packed(new), key=len)
        self.write(packed)
        return len(places_K)

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
    """Reads a delta front to back. Every method raises DeltaError for bytes that no writer produces."""

    def __init__(self, file: BinaryIO, files: int) -> None:
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor()
        if self.take(len(MAGIC)) != MAGIC:
            raise DeltaError("not a delta, or of an unknown format version")
        self.file_kinds = [_kind(number, Kind.SAME, Kind.WHOLE, Kind.TENSORS) for number in self.take(files)]

    def take(self, size_bytes: int) -> bytes:
        data = self._file.read(size_bytes)
        if len(data) != size_bytes:
            raise DeltaError(f"the delta is truncated at byte {self._file.tell()}")
        return data

    def piece_kind(self) -> Kind:
        return _kind(self.take(1)[0], Kind.SAME, Kind.WHOLE, Kind.CHANGES)

    def changes(self, words: int, word_bytes: int) -> tuple[Places, Words]:
        """For a piece of `words` words: the positions of changed words, ascending, and the steps to add there."""
        count = self._number()
        if not 0 < count <= words:
            raise DeltaError(f"{count} changes in {words} words")
        places_K = np.cumsum(self.words(count, 4) + np.int64(1)) - 1
        if places_K[-1] >= words:
            raise DeltaError(f"a change at word {places_K[-1]} of {words}")
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
            raise DeltaError(f"a plane of {raw_bytes} bytes takes {size_bytes} bytes")
        data = self.take(size_bytes)
        if size_bytes == raw_bytes:
            return data
        try:
            # Check first: the decompressor allocates the size that the frame claims.
            if zstandard.frame_content_size(data) != raw_bytes:
                raise DeltaError(f"a zstd frame does not have the {raw_bytes} bytes of its plane")
            return self._decompressor.decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise DeltaError(f"not a zstd frame: {error}") from error

    def _number(self) -> int:
        return int.from_bytes(self.take(4), "little")


def _kind(number: int, *allowed: Kind) -> Kind:
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
