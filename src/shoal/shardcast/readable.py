"""What a version is read from: its files by name, whether they lie in a folder or are still being written.

Called by origin and delta; `growing.Growing` is the other kind of `Files`.
"""

from __future__ import annotations

from io import BufferedReader
from pathlib import Path
from typing import Protocol

from .manifest import FileEntry, ManifestError, check_paths


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
    return folder, entries({file.relative_to(folder): file.stat().st_size for file in paths}, folder)


def entries(sizes_bytes: dict[Path, int], folder: Path) -> list[FileEntry]:
    """Files by their paths in a folder, in the order in which they are published. Raises ManifestError."""
    names = [path.as_posix() for path in sorted(sizes_bytes)]
    check_paths(names)
    if not names:
        raise ManifestError(f"{folder} holds no files")
    return [FileEntry(path=name, size_bytes=sizes_bytes[Path(name)]) for name in names]
