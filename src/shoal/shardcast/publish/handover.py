"""Watches the folder where a learner writes its versions, and publishes the newest one while it is being written.

Invariant: a version that was given up once is not tried again before it is complete.
Called by the role `origin` and by `alone`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shoal.shardcast.format.manifest import Manifest, ManifestError
from shoal.shardcast.format.names import parse_version
from shoal.shardcast.format.safetensors_layout import LayoutError
from shoal.shardcast.publish.growing import TEMPORARY, GivenUpError, Growing
from shoal.shardcast.publish.origin import Origin


class Handover:
    def __init__(self, origin: Origin, watched: Path, stopped: Callable[[], bool]) -> None:
        """`stopped` ends every wait for the writer."""
        self.origin, self.watched, self.stopped = origin, watched, stopped
        self.given_up = ""  # why the last version was not published while it was being written
        self._tried: set[tuple[int, int]] = set()

    def begun(self) -> Growing | None:
        """The newest unpublished version that is being written and can already be read."""
        newest = max(self.origin.published(), default=-1)
        for temporary in sorted(self.watched.glob(".v*/.*.safetensors.tmp"), reverse=True):
            version = parse_version(temporary.parent.name[1:])
            name = TEMPORARY.fullmatch(temporary.name)
            if version is None or version <= newest or name is None:
                continue
            try:
                growing = Growing(version, temporary.parent, name[1], self.stopped)
            except (FileNotFoundError, LayoutError, ManifestError):
                continue  # already renamed, or not readable before it is complete
            if growing.has_header and growing.identity not in self._tried:
                return growing
            growing.close()
        return None

    def follow(self, growing: Growing) -> Manifest | None:
        """Publishes it; None if its writer gave up or is too slow. It can be published when it is complete."""
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
