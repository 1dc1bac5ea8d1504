"""What a version is read from: its files by name, whether they lie in a folder or are still being written.

Called by origin and delta; `growing.Growing` is the other kind of `Files`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Protocol

from pydantic import ValidationError

from shoal.shardcast.format.manifest import FileEntry, ManifestError, TensorEntry, check_paths
from shoal.shardcast.format.safetensors_layout import LayoutError, layout_of


class Files(Protocol):
    def open(self, name: str) -> BufferedReader: ...
    def size_bytes(self, name: str) -> int:
        """What it has when it is whole."""


class Folder:
    """Files that are whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, name: str) -> BufferedReader:
        return (self.path / name).open("rb")

    def size_bytes(self, name: str) -> int:
        return (self.path / name).stat().st_size


def files_at(path: Path) -> tuple[Path, list[FileEntry]]:
    """A folder, and the files in it to publish: all, or the one that `path` is. Raises ManifestError."""
    folder = path if path.is_dir() else path.parent
    paths = sorted(file for file in folder.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return folder, in_order(listed(paths, folder), folder)


def listed(paths: Iterable[Path], folder: Path) -> list[FileEntry]:
    """Files of a folder that are whole. Raises ManifestError."""
    found = []
    for path in paths:
        with path.open("rb") as file:
            found.append(entry(path.relative_to(folder), file, path.stat().st_size))
    return found


def in_order(files: Sequence[FileEntry], folder: Path) -> list[FileEntry]:
    """The files of a folder in the order in which they are published. Raises ManifestError."""
    ordered = sorted(files, key=lambda file: Path(file.path))
    check_paths([file.path for file in ordered])
    if not ordered:
        raise ManifestError(f"{folder} holds no files")
    return ordered


def entry(path: Path, file: BinaryIO, size_bytes: int) -> FileEntry:
    """A file that has, or will have, so many bytes, with its tensors if it is safetensors. Raises ManifestError."""
    try:
        return FileEntry(path=path.as_posix(), size_bytes=size_bytes, tensors=_tensors(path, file, size_bytes))
    except ValidationError as error:
        raise ManifestError(f"{path} cannot be published: {error}") from error


def _tensors(path: Path, file: BinaryIO, size_bytes: int) -> tuple[TensorEntry, ...]:
    if path.suffix != ".safetensors":
        return ()
    try:
        layout = layout_of(file, size_bytes, path.name)
    except LayoutError:
        return ()  # a file like any other: its bytes are published as they are
    return tuple(TensorEntry(name=found.name, dtype=found.dtype, shape=found.shape) for found in layout.tensors)
