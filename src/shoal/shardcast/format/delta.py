"""The exact difference between two versions of a model folder: `encode` needs both, `apply` needs the old one.

Between two steps of reinforcement learning at most a few per cent of the bf16 words change. A safetensors file whose
header is the same in both versions is encoded as the changed words of each tensor (delta_format.py). Any other file is
either unchanged or sent whole.

Invariant: paths, sizes and headers come from the caller and the old version, never from the delta. The files that `apply`
writes have those sizes. The caller must verify their contents against the manifest.
`encode` reads each file of the new version once, except unchanged files without tensors. `apply` takes a chain of deltas and
reads and writes each file once, however long the chain is.
Called by the origin (encode) and clients (apply).
Left out: merging the deltas of several versions into one (readers fetch the chain), and renamed files (sent whole).
Source: docs/shardcast.md has the measurements; the paper sends whole checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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


@dataclass(frozen=True)
class Link:
    """A delta on disk, and the paths and sizes of the files that it leads to, in encoded order."""

    delta: Path
    files: tuple[tuple[str, int], ...]


def encode(
    old: Path,
    new: Path | Files,
    files: Sequence[str],
    sink: Callable[[bytes], None],
    passed: Callable[[memoryview], None] = lambda data: None,
) -> DeltaStats:
    """Passes `sink` the delta from the folder `old` to `new`. `files` are the paths in `new`, which is read front to back.
    `passed` gets all bytes of these files, in that order, so that they need not be read again to be hashed.
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
                passed(memoryview(layout.header))
                for piece in pieces(*layout.tensors):
                    words = _read(after, piece)
                    passed(_bytes(words))
                    compared_words += piece.words
                    changed_words += writer.piece(_read(before, piece), words)
        else:
            with source.open(path) as file:
                for piece in pieces(as_one_tensor(path, source.size_bytes(path))):
                    words = _read(file, piece)
                    passed(_bytes(words))
                    if kind is Kind.WHOLE:
                        writer.words(words)
    size_bytes = sum(source.size_bytes(path) for path in files)
    return DeltaStats(size_bytes, writer.size_bytes, compared_words, changed_words)


def passes(chain: Iterable[Link]) -> list[list[Link]]:
    """Cuts a chain of deltas into runs that `apply` takes at once: they lead to files of the same names and sizes, and none
    changes tensors of a file that another one sends whole. Raises DeltaError."""
    runs: list[list[Link]] = []
    kinds: list[Kind] = []  # of the files in the last run
    for link in chain:
        with link.delta.open("rb") as file:
            here = Reader(file, len(link.files)).file_kinds
        if runs and runs[-1][0].files == link.files and all(map(_fit, kinds, here)):
            runs[-1].append(link)
            kinds = list(map(max, kinds, here))  # SAME is the least
        else:
            runs.append([link])
            kinds = here
    return runs


def apply(old: Path, run: Sequence[Link], out: Path, written: Callable[[memoryview], None] = lambda data: None) -> None:
    """Writes into `out`, which must not be `old`, the version that `run` leads to: one delta, or several of `passes`.
    `written` gets all bytes of the new files, in encoded order, so that they need not be read again to be verified.

    Raises DeltaError, and OSError from the disk. The files in `out` are then incomplete.
    """
    files = run[-1].files
    with ExitStack() as stack:
        readers = [Reader(stack.enter_context(link.delta.open("rb")), len(files)) for link in run]
        for place, (path, size_bytes) in enumerate(files):
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            kinds = [reader.file_kinds[place] for reader in readers]
            changing = [reader for reader, kind in zip(readers, kinds, strict=True) if kind is not Kind.SAME]
            with _Told(out / path, written) as target:
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


def _fit(kind: Kind, other: Kind) -> bool:
    return kind is other or Kind.SAME in (kind, other)


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


def _write_changed(readers: Sequence[Reader], source: BufferedReader, target: _Told) -> None:
    """Writes a file of tensors up to the end of its last changed piece. Each reader has the changes of one version."""
    try:
        layout = read_layout(Path(source.name))
    except LayoutError as error:
        raise DeltaError(f"the delta was made against another version: {error}") from error
    header_hash = blake3(layout.header).digest()
    if any(reader.take(len(header_hash)) != header_hash for reader in readers):
        raise DeltaError(f"the delta was made against another version: the header of {source.name} differs")
    for piece in pieces(*layout.tensors):
        words: Words | None = None  # None: as in the file
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


def _bytes(words: Words) -> memoryview:
    return words.data.cast("B") if len(words) else memoryview(b"")


def _copy(source: BufferedReader, target: _Told, end_bytes: int) -> None:
    """Copies `source` to `target`, from the end of `target` to `end_bytes`."""
    at_bytes = target.tell()
    source.seek(at_bytes)
    while at_bytes < end_bytes:
        data = source.read(min(end_bytes - at_bytes, CHUNK_BYTES))
        if not data:
            raise DeltaError(f"{source.name} became shorter while it was read")
        at_bytes += target.write(data)
