"""The exact difference between two versions of a model folder: `encode` needs both, `apply` needs the old one.

Between two steps of reinforcement learning at most a few per cent of the bf16 words change. A safetensors file whose
header is the same in both versions is encoded as the changed words of each tensor (delta_format.py). Any other file is
either unchanged or sent whole.

Invariant: paths, sizes and headers come from the caller and the old version, never from the delta. The files that `apply`
writes have those sizes. The caller must verify their contents against the manifest.
Called by the origin (encode) and clients (apply).
Left out: deltas across several versions (apply one after the other), and renamed files (sent whole).
Source: docs/shardcast.md has the measurements; the paper sends whole checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Protocol

import numpy as np
from blake3 import blake3

from shoal.files import CHUNK_BYTES
from shoal.shardcast.format import delta_format
from shoal.shardcast.format.delta_format import MAGIC, DeltaError, Kind, Reader, Words, Writer
from shoal.shardcast.format.safetensors_layout import LayoutError, StoredTensor, as_one_tensor, layout_of, read_layout


class Files(Protocol):
    """The files of a version, complete or still being written."""

    def open(self, name: str) -> BufferedReader: ...
    def size_bytes(self, name: str) -> int:
        """The size of the complete file."""


class Folder:
    """`Files` that are complete."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, name: str) -> BufferedReader:
        return (self.path / name).open("rb")

    def size_bytes(self, name: str) -> int:
        return (self.path / name).stat().st_size


@dataclass(frozen=True)
class DeltaStats:
    size_bytes: int  # of the new version
    delta_bytes: int
    compared_words: int  # in tensors
    changed_words: int


def encode(old: Path, new: Path | Files, files: Sequence[str], sink: Callable[[bytes], None]) -> DeltaStats:
    """Passes `sink` the delta from the folder `old` to `new`. `files` are the paths in `new`, which is read front to back.
    Raises OSError, and DeltaError if a file is truncated while it is read."""
    writer = Writer(sink)
    source = Folder(new) if isinstance(new, Path) else new
    kinds = [_kind(old / path, source, path) for path in files]
    writer.write(MAGIC + bytes(kinds))
    compared_words = changed_words = 0
    for path, kind in zip(files, kinds, strict=True):
        if kind is Kind.TENSORS:
            with (old / path).open("rb") as before, source.open(path) as after:
                layout = layout_of(after, source.size_bytes(path), path)
                writer.write(blake3(layout.header).digest())
                for piece in pieces(*layout.tensors):
                    compared_words += piece.words
                    changed_words += writer.piece(_read(before, piece), _read(after, piece))
        elif kind is Kind.WHOLE:
            with source.open(path) as file:
                for piece in pieces(as_one_tensor(path, source.size_bytes(path))):
                    writer.words(_read(file, piece))
    size_bytes = sum(source.size_bytes(path) for path in files)
    return DeltaStats(size_bytes, writer.size_bytes, compared_words, changed_words)


def apply(
    old: Path,
    delta: Path,
    out: Path,
    files: Sequence[tuple[str, int]],
    written: Callable[[memoryview], None] = lambda data: None,
) -> None:
    """Writes the new version into `out`, which must not be `old`. `files` are its paths and sizes, in encoded order.
    `written` gets all bytes of the new files, in that order, so that they need not be read again to be verified.

    Raises DeltaError, and OSError from the disk. The files in `out` are then incomplete.
    """
    with delta.open("rb") as file:
        reader = Reader(file, len(files))
        for (path, size_bytes), kind in zip(files, reader.file_kinds, strict=True):
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            with _Told(out / path, written) as target:
                if kind is Kind.WHOLE:
                    for piece in pieces(as_one_tensor(path, size_bytes)):
                        target.write(reader.words(piece.words, 1).data)
                    continue
                with _old_file(old / path, size_bytes) as source:
                    if kind is Kind.TENSORS:
                        _write_changed(reader, source, target)
                    _copy(source, target, size_bytes)
        reader.end()


def _kind(old: Path, source: Files, path: str) -> Kind:
    if not old.is_file():
        return Kind.WHOLE
    try:
        with source.open(path) as file:
            if read_layout(old).header == layout_of(file, source.size_bytes(path), path).header:
                return Kind.TENSORS
    except LayoutError:
        pass
    return Kind.SAME if _equal(old, source, path) else Kind.WHOLE


def _equal(old: Path, source: Files, path: str) -> bool:
    size_bytes = source.size_bytes(path)
    if old.stat().st_size != size_bytes:
        return False
    with old.open("rb") as before, source.open(path) as after:
        return all(before.read(CHUNK_BYTES) == after.read(CHUNK_BYTES) for _ in range(0, size_bytes, CHUNK_BYTES))


class _Told:
    """A file that is written front to back, and tells what is written."""

    def __init__(self, path: Path, written: Callable[[memoryview], None]) -> None:
        self._file = path.open("wb")
        self._written = written

    def __enter__(self) -> _Told:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def tell(self) -> int:
        return self._file.tell()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._written(view)
        return len(view)


def _write_changed(reader: Reader, source: BufferedReader, target: _Told) -> None:
    """Writes a file of tensors up to the end of its last changed piece."""
    try:
        layout = read_layout(Path(source.name))
    except LayoutError as error:
        raise DeltaError(f"the delta was made against another version: {error}") from error
    header_hash = blake3(layout.header).digest()
    if reader.take(len(header_hash)) != header_hash:
        raise DeltaError(f"the delta was made against another version: the header of {source.name} differs")
    for piece in pieces(*layout.tensors):
        kind = reader.piece_kind()
        if kind is Kind.SAME:
            continue
        if kind is Kind.WHOLE:
            words = reader.words(piece.words, piece.word_bytes)
        else:
            words = _read(source, piece)
            places_K, steps_K = reader.changes(piece.words, piece.word_bytes)
            words[places_K] += steps_K
        _copy(source, target, piece.offset_bytes)
        target.write(words.data)


def pieces(*tensors: StoredTensor) -> Iterator[StoredTensor]:
    """The tensors in file order, each cut into pieces of at most PIECE_WORDS words."""
    most = delta_format.PIECE_WORDS
    for tensor in tensors:
        for start in range(0, tensor.words, most):
            offset_bytes = tensor.offset_bytes + start * tensor.word_bytes
            yield replace(tensor, offset_bytes=offset_bytes, words=min(most, tensor.words - start))


@contextmanager
def _old_file(path: Path, size_bytes: int) -> Iterator[BufferedReader]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise DeltaError(f"the delta was made against another version: {error}") from error
    with file:
        if (held_bytes := path.stat().st_size) != size_bytes:
            raise DeltaError(
                f"the delta was made against another version: {path} has {held_bytes} bytes, expected {size_bytes}"
            )
        yield file


def _read(file: BufferedReader, piece: StoredTensor) -> Words:
    words: Words = np.empty(piece.words, f"<u{piece.word_bytes}")
    file.seek(piece.offset_bytes)
    if file.readinto(words.data) != words.nbytes:
        raise DeltaError(f"{file.name} became shorter while it was read")
    return words


def _copy(source: BufferedReader, target: _Told, end_bytes: int) -> None:
    """Copies `source` to `target`, from the end of `target` to `end_bytes`."""
    at_bytes = target.tell()
    source.seek(at_bytes)
    while at_bytes < end_bytes:
        data = source.read(min(end_bytes - at_bytes, CHUNK_BYTES))
        if not data:
            raise DeltaError(f"{source.name} became shorter while it was read")
        at_bytes += target.write(data)
