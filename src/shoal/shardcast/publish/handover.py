"""The folder where a learner puts its versions, from the origin's side: what it is writing now is taken up meanwhile.

Invariant: what was given up once is not taken up again before it is whole.
Called by who watches such a folder: the role `origin` and `alone`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shoal.shardcast.format.manifest import Manifest, ManifestError
from shoal.shardcast.format.safetensors_layout import LayoutError
from shoal.shardcast.publish.growing import TEMPORARY, GivenUpError, Growing
from shoal.shardcast.publish.origin import Origin
from shoal.shardcast.store import parse_version


class Handover:
    def __init__(self, origin: Origin, watched: Path, stopped: Callable[[], bool]) -> None:
        """`stopped` ends the wait for a writer."""
        self.origin, self.watched, self.stopped = origin, watched, stopped
        self.given_up = ""  # why the last version was not published while it was written
        self._tried: set[tuple[int, int]] = set()

    def begun(self) -> Growing | None:
        """The newest version that is being written such that it may be read meanwhile, and is newer than all published."""
        newest = max(self.origin.published(), default=-1)
        for temporary in sorted(self.watched.glob(".v*/.*.safetensors.tmp"), reverse=True):
            version = parse_version(temporary.parent.name[1:])
            name = TEMPORARY.fullmatch(temporary.name)
            if version is None or version <= newest or name is None:
                continue
            try:
                growing = Growing(version, temporary.parent, name[1], self.stopped)
            except (FileNotFoundError, LayoutError, ManifestError):
                continue  # gone again, or nothing to be read before it is whole
            if growing.has_header and growing.identity not in self._tried:
                return growing
            growing.close()
        return None

    def follow(self, growing: Growing) -> Manifest | None:
        """Publishes it; None where its writer gave it up, or is too slow: it is published once it is whole."""
        self._tried.add(growing.identity)
        try:
            manifest = self.origin.follow(growing)
        except GivenUpError as error:
            self.given_up = str(error)
            return None
        finally:
            growing.close()
        self.given_up = ""
        return manifest
