"""The files of the version that was published last, which the next one's delta is made against.

Called by the origin.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.files import CHUNK_BYTES, discard
from shoal.shardcast.fetch.partial import Layout
from shoal.shardcast.format.manifest import FileEntry, Manifest
from shoal.shardcast.store import parse_version, version_name


class Latest:
    """Hard links where possible: learners put a new version beside the old one, and never write into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: tuple[int, list[int]] | None = None  # version, modification times

    @property
    def folder(self) -> Path:
        return next(iter(self.path.glob("v*")), self.path / "none")

    def keep(self, folder: Path, manifest: Manifest) -> None:
        discard(self.path)
        target = self.path / version_name(manifest.version)
        for file in manifest.files:
            (target / file.path).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(folder / file.path, target / file.path)
            except OSError:  # another device, or a file system without links
                shutil.copyfile(folder / file.path, target / file.path)
        self._known = manifest.version, file_times(target, manifest.files)

    def manifest(self, held: dict[int, Manifest]) -> Manifest | None:
        """Of the version whose files are here, if they are still what was published."""
        version = parse_version(self.folder.name)
        manifest = None if version is None else held.get(version)
        if manifest is None:
            return None
        try:
            if self._known == (version, file_times(self.folder, manifest.files)):
                return manifest
        except FileNotFoundError:
            return None
        # Left by an earlier process, or written to.
        return manifest if Layout(self.folder, manifest.files).holds(manifest.content) else None


def file_times(folder: Path, files: Sequence[FileEntry]) -> list[int]:
    return [(folder / file.path).stat().st_mtime_ns for file in files]


def file_chunks(folder: Path, files: Sequence[FileEntry]) -> Iterator[memoryview]:
    """The files' bytes; each view is valid until the next."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for entry in files:
        with (folder / entry.path).open("rb", buffering=0) as file:
            while size_bytes := file.readinto(buffer):
                yield buffer[:size_bytes]
