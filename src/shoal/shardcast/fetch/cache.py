"""The versions a client has fetched whole, and the lock that lets several clients share them.

    cache/v000007/                  exactly the published files
    cache/v000007.manifest.json     their signed manifest
    cache/v000007.delta             how they came from the version before, where they did

Invariant: a folder named like a version is whole: it was verified before it got that name, and is again before a process
uses what another one left.
Called by the client.
Left out: leases: a caller that still reads a version older than `keep` must hold its own copy open.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.files import discard, fsync, remove_leftovers, write_file
from shoal.shardcast.fetch.partial import Layout, disk_errors
from shoal.shardcast.fetch.sources import FetchError
from shoal.shardcast.format.manifest import Manifest, ManifestError, SignedManifest
from shoal.shardcast.store import parse_version, version_name

LOOK_AGAIN_S = 0.05


class Cache:
    def __init__(self, path: Path, *, public_key: str, run: str | None, keep: int) -> None:
        if keep < 1:
            raise ValueError("keep must be at least 1")
        self.path, self.public_key, self.run, self.keep = path, public_key, run, keep
        self._verified: set[str] = set()  # digests of versions whose bytes this process has read back

    def folder(self, version: int) -> Path:
        return self.path / version_name(version)

    def temporary(self, version: int, what: str) -> Path:
        return self.path / f".{version_name(version)}.{what}"

    def offer(self, version: int) -> tuple[SignedManifest, Manifest]:
        """The manifest of a version that is held. Raises OSError, ManifestError."""
        signed = SignedManifest.parse(manifest_path(self.folder(version)).read_bytes())
        return signed, signed.open(self.public_key, run=self.run, version=version)

    def held(self, version: int, digest: str | None = None) -> tuple[Path, Manifest] | None:
        """A whole version, of that digest where one is given."""
        try:
            _, manifest = self.offer(version)
        except (OSError, ManifestError):
            return None
        if digest not in (None, manifest.digest):
            return None
        layout = Layout(self.folder(version), manifest.files)
        if manifest.digest in self._verified:
            return (self.folder(version), manifest) if layout.sizes_fit() else None
        if not manifest.complete or not layout.holds(manifest.content):
            return None
        self._verified.add(manifest.digest)
        return self.folder(version), manifest

    def add(self, files: Path, signed: SignedManifest, manifest: Manifest) -> Path | None:
        """Gives the files in a folder their name, if they are what was published; else None, and they are gone."""
        layout = Layout(files, manifest.files)
        if not layout.holds(manifest.content):
            discard(files)
            return None
        final = self.folder(manifest.version)
        with disk_errors(self.path):
            for path in layout.paths:
                fsync(path)
            for folder in {parent for path in layout.paths for parent in path.parents if parent.is_relative_to(files)}:
                fsync(folder)
            discard(final)
            write_file(manifest_path(final), signed.to_bytes())
            files.rename(final)
            fsync(self.path)
        self._verified.add(manifest.digest)
        return final

    def versions(self) -> list[int]:
        """Newest first."""
        names = (path.name for path in self.path.iterdir()) if self.path.is_dir() else ()
        return sorted((v for name in names if (v := parse_version(name)) is not None), reverse=True)

    def drop(self, version: int) -> None:
        discard(self.folder(version))
        manifest_path(self.folder(version)).unlink(missing_ok=True)
        delta_path(self.folder(version)).unlink(missing_ok=True)

    def retain(self, current: int) -> None:
        """Drops all but the newest `keep` and `current`, all deltas but that to `current`, and what was begun before."""
        versions = self.versions()
        for version in versions[self.keep :]:
            if version != current:
                self.drop(version)
        for path in set(self.path.glob("v*.delta")) - {delta_path(self.folder(current))}:
            path.unlink()
        for path in self.path.glob(".v*"):
            begun = parse_version(path.name.split(".")[1])
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


def manifest_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.manifest.json")


def delta_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.delta")


def read_manifest(folder: Path) -> Manifest:
    """Of a version that a client left in its cache; its signature was checked then. Raises OSError, ManifestError."""
    return SignedManifest.parse(manifest_path(folder).read_bytes()).unchecked()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
