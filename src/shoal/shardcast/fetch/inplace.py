"""Applies a delta to tensors in memory that hold the old version, so that only changed words are copied.

Invariant: nothing is written unless the delta matches the manifest's hashes and fits all tensors. Afterwards tensors that
held the old version hold the new one, bit for bit.
The folders are of one client's cache.
Left out: tensors in memory that differ from the stored ones (fused, transposed, quantised), except bf16 held as float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.shardcast.delta import DeltaError, Kind, Places, Reader, Words, pieces
from shoal.shardcast.fetch.cache import delta_path, read_manifest
from shoal.shardcast.files import StoredTensor, StreamFiles, as_one_tensor, read_layout
from shoal.shardcast.manifest import FileEntry, Manifest, ManifestError

SIGNED = {1: np.int8, 2: np.int16, 4: np.int32}  # torch has few operations on unsigned integers


@dataclass(frozen=True)
class _Change:
    name: str
    start: int  # in words of the tensor
    piece: StoredTensor
    places_K: Places | None  # None: the whole piece
    words_K: Words  # the steps to add there; without places, the new words


@torch.no_grad()
def advance_(tensors: Mapping[str, Tensor], old: Path, new: Path) -> bool:
    """Update `tensors`, by their names in the files, from the version in folder `old` to the version in `new`.

    Return False and changes nothing if `new` was not fetched as a delta of `old`, or if the tensors differ in form from
    the stored ones.
    """
    try:
        before, after = read_manifest(old), read_manifest(new)
        if after.delta is None or (after.delta.parent, after.delta.parent_digest) != (before.version, before.digest):
            return False
        path = delta_path(new)
        file = FileEntry(path=path.name, size_bytes=path.stat().st_size)
        if not StreamFiles(path.parent, [file]).match(after.delta.stream):
            return False
        changes = list(_changes(path, new, after))
    except (DeltaError, ManifestError, FileNotFoundError):
        return False
    if not all(_fits(tensors.get(change.name), change.piece) for change in changes):
        return False
    for change in changes:
        _write_(tensors[change.name], change)
    return True


def _changes(delta: Path, new: Path, manifest: Manifest) -> Iterator[_Change]:
    with delta.open("rb") as file:
        reader = Reader(file, len(manifest.files))
        for entry, file_kind in zip(manifest.files, reader.file_kinds, strict=True):
            if file_kind is Kind.SAME:
                continue
            if file_kind is Kind.WHOLE:
                if entry.path.endswith(".safetensors"):
                    raise DeltaError(f"{entry.path} was sent whole")
                for piece in pieces(as_one_tensor(entry.path, entry.size_bytes)):
                    reader.words(piece.words, 1)
                continue
            layout = read_layout(new / entry.path)  # the header is the same in both versions
            reader.take(32)  # its hash, which `apply` has compared
            for tensor in layout.tensors:
                if tensor.dtype != "BF16":
                    raise DeltaError(f"{tensor.name} is not stored in bf16")
                for piece in pieces(tensor):
                    start = (piece.offset_bytes - tensor.offset_bytes) // piece.word_bytes
                    kind = reader.piece_kind()
                    if kind is Kind.CHANGES:
                        yield _Change(tensor.name, start, tensor, *reader.changes(piece.words, piece.word_bytes))
                    elif kind is Kind.WHOLE:
                        words = reader.words(piece.words, piece.word_bytes)
                        yield _Change(tensor.name, start, tensor, None, words)


def _fits(tensor: Tensor | None, stored: StoredTensor) -> bool:
    return (
        tensor is not None
        and tensor.dtype in (torch.bfloat16, torch.float32)
        and tensor.numel() == stored.words
        and tensor.is_contiguous()
    )


def _write_(tensor: Tensor, change: _Change) -> None:
    words_K = torch.from_numpy(change.words_K.view(SIGNED[change.words_K.itemsize])).to(tensor.device)
    flat = tensor.view(-1)
    if tensor.dtype == torch.float32:  # bf16 is the upper half of float32
        words_K, flat = words_K.int() << 16, flat.view(torch.int32)
    else:
        flat = flat.view(torch.int16)
    if change.places_K is None:
        flat[change.start : change.start + len(words_K)] = words_K
    else:
        places_K = torch.from_numpy(change.places_K).to(tensor.device) + change.start
        flat[places_K] += words_K
