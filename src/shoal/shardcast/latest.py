"""The files of the version that was published last, which the next one's delta is made against.

Called by the origin.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from .cutter import Cutter
from .files import CHUNK_BYTES, discard
from .manifest import FileEntry, Manifest
from .store import parse_version, version_name


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
        self._known = manifest.version, self._times(manifest)

    def manifest(self, held: dict[int, Manifest]) -> Manifest | None:
        """Of the version whose files are here, if they are still what was published."""
        manifest = held.get(parse_version(self.folder.name) or 0)
        if manifest is None or not self.folder.is_dir() or manifest.version != parse_version(self.folder.name):
            return None
        try:
            if self._known == (manifest.version, self._times(manifest)):
                return manifest
            cutter = Cutter(manifest.content.shard_size_bytes, None)  # left by an earlier process
            for chunk in file_chunks(self.folder, manifest.files):
                cutter.add(chunk)
            cutter.finish()
        except FileNotFoundError:
            return None
        return manifest if tuple(cutter.shards) == manifest.content.shards else None

    def _times(self, manifest: Manifest) -> list[int]:
        return [(self.folder / file.path).stat().st_mtime_ns for file in manifest.files]


def file_chunks(folder: Path, files: Sequence[FileEntry]) -> Iterator[memoryview]:
    """The files' bytes; each view is valid until the next."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for entry in files:
        with (folder / entry.path).open("rb", buffering=0) as file:
            while size_bytes := file.readinto(buffer):
                yield buffer[:size_bytes]
