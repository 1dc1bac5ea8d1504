"""The versions a client has fetched whole, and the lock that lets several clients share them.

    cache/v000007/                  exactly the published files
    cache/v000007.manifest.json     their signed manifest

Invariant: a folder named like a version is whole: it was verified before it got that name.
Called by the client.
Left out: leases: a caller that still reads a version older than `keep` must hold its own copy open.
Paper: INTELLECT-2, SHARDCAST (clients keep recent versions for the asynchrony of the trainer).
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .failover import FetchError
from .manifest import Manifest, ManifestError, SignedManifest
from .partial import disk_errors
from .store import discard, parse_version, remove_leftovers, version_name

LOOK_AGAIN_S = 0.05


class Cache:
    def __init__(self, path: Path, *, public_key: str, run: str | None, keep: int) -> None:
        if keep < 1:
            raise ValueError("keep must be at least 1")
        self.path, self.public_key, self.run, self.keep = path, public_key, run, keep

    def folder(self, version: int) -> Path:
        return self.path / version_name(version)

    def held(self, version: int, digest: str | None = None) -> tuple[Path, Manifest] | None:
        """A whole version, of that digest where one is given. Looks at sizes, not at bytes."""
        folder = self.folder(version)
        try:
            body = self._manifest_path(version).read_bytes()
            manifest = SignedManifest.parse(body).open(self.public_key, run=self.run, version=version)
            whole = all((folder / file.path).stat().st_size == file.size_bytes for file in manifest.files)
        except (OSError, ManifestError):
            return None
        return (folder, manifest) if whole and digest in (None, manifest.digest) else None

    def retain(self, current: int) -> None:
        """Drops all but the newest `keep` and `current`, and what was begun before `current`."""
        versions = sorted(
            (v for path in self.path.iterdir() if (v := parse_version(path.name)) is not None), reverse=True
        )
        for version in versions[self.keep :]:
            if version != current:
                discard(self.folder(version))
                self._manifest_path(version).unlink(missing_ok=True)
        for path in self.path.glob(".*.partial"):
            begun = parse_version(path.name[1:].removesuffix(".partial"))
            if begun is not None and begun <= current:
                discard(path)

    @contextmanager
    def locked(self, deadline_s: float) -> Iterator[None]:
        """One writer at a time, over threads and processes; `deadline_s` is in time.monotonic()."""
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("a")
        with lock:
            while not _try_lock(lock.fileno()):
                if time.monotonic() >= deadline_s:
                    raise FetchError(f"another client still holds {self.path / '.lock'}; stop it or raise timeout_s")
                time.sleep(LOOK_AGAIN_S)
            remove_leftovers(self.path)
            yield

    def _manifest_path(self, version: int) -> Path:
        return self.path / f"{version_name(version)}.manifest.json"


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
