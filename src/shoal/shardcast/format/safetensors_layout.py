"""Where a safetensors file stores its tensors, and the width of their words (numbers of 1, 2 or 4 bytes).

Invariant: the tensors of a `Layout` fill the file from the end of the header to its end without gaps, and each holds a
whole number of words.
Called by delta, inplace, growing and contents.
Left out: words of other widths (such tensors are treated as bytes).
Source: the safetensors format: eight bytes of header length (little-endian), the header in JSON, the data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
WORD_BYTES = {"BF16": 2, "F16": 2, "F32": 4}  # of all others: 1


class LayoutError(ValueError):
    """This is not a valid safetensors file, and why."""


@dataclass(frozen=True)
class StoredTensor:
    name: str
    dtype: str  # as in the header
    shape: tuple[int, ...]
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
    """Any other file, as one tensor of bytes."""
    return StoredTensor(name, "U8", (size_bytes,), 0, size_bytes, 1)


def read_layout(path: Path) -> Layout:
    """Raises LayoutError, and OSError from the disk."""
    with path.open("rb") as file:
        return layout_of(file, path.stat().st_size, path.name)


def layout_of(file: BinaryIO, size_bytes: int, name: str) -> Layout:
    """The layout of a file that has, or will have, `size_bytes`; reads its header. Raises LayoutError, OSError."""
    header = _header(file, name)
    if len(header) > size_bytes:
        raise LayoutError(f"{name} has no safetensors header")
    tensors = _tensors(header, name)
    edges = [(len(header), len(header)), *map(_place, tensors), (size_bytes, size_bytes)]
    if any(before[1] != after[0] for before, after in pairwise(edges)):
        raise LayoutError(f"the tensors of {name} leave gaps, overlap, or do not end where the file ends")
    return Layout(header, tuple(tensors))


def final_size_bytes(file: BinaryIO, name: str) -> int | None:
    """The final size of a file that is still being written; None until its header is complete.
    Raises LayoutError, OSError."""
    try:
        header = _header(file, name)
    except LayoutError:
        return None
    return max((tensor.end_bytes for tensor in _tensors(header, name)), default=len(header))


def _header(file: BinaryIO, name: str) -> bytes:
    prefix = file.read(8)
    rest_bytes = int.from_bytes(prefix, "little")
    if len(prefix) == 8 and rest_bytes <= MAX_HEADER_BYTES and len(rest := file.read(rest_bytes)) == rest_bytes:
        return prefix + rest
    raise LayoutError(f"{name} has no safetensors header")


def _tensors(header: bytes, name: str) -> list[StoredTensor]:
    """In file order."""
    try:
        entries = json.loads(header[8:])
        entries.pop("__metadata__", None)
        return sorted((_tensor(tensor, entry, len(header)) for tensor, entry in entries.items()), key=_place)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LayoutError(f"{name} has a malformed safetensors header: {error}") from error


def _tensor(name: str, entry: dict[str, object], start_bytes: int) -> StoredTensor:
    match entry["dtype"], entry["shape"], entry["data_offsets"]:
        case str(dtype), [*sizes], [int(begin), int(end)] if 0 <= begin <= end:
            shape = tuple(size for size in sizes if isinstance(size, int))
            word_bytes = WORD_BYTES.get(dtype, 1)
            words, rest = divmod(end - begin, word_bytes)
            if not rest and len(shape) == len(sizes):
                return StoredTensor(name, dtype, shape, start_bytes + begin, words, word_bytes)
    raise ValueError(f"tensor {name!r}")


def _place(tensor: StoredTensor) -> tuple[int, int]:
    return tensor.offset_bytes, tensor.end_bytes
