"""The files of the last published version, from which the next delta is made.

Called by the origin.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from shoal.files import discard
from shoal.shardcast.format.manifest import Manifest
from shoal.shardcast.format.names import parse_version, version_name
from shoal.shardcast.format.stream_files import StreamFiles
from shoal.shardcast.publish.contents import file_times


class Latest:
    """Uses hard links if possible: learners never write into a published version."""

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
                os.link((folder / file.path).resolve(), target / file.path)  # not a link to a link
            except OSError:  # another device, or a file system without hard links
                shutil.copyfile(folder / file.path, target / file.path)
        self._known = manifest.version, file_times(target, manifest.files)

    def manifest(self, held: dict[int, Manifest]) -> Manifest | None:
        """The manifest of the version stored here, if its files are still what was published."""
        version = parse_version(self.folder.name)
        manifest = None if version is None else held.get(version)
        if manifest is None:
            return None
        try:
            if self._known == (version, file_times(self.folder, manifest.files)):
                return manifest
        except FileNotFoundError:
            return None
        # An earlier process left it, or the files were written to.
        return manifest if StreamFiles(self.folder, manifest.files).match(manifest.content) else None
