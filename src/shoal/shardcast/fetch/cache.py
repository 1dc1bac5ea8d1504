"""The client's cache: complete versions, partial downloads, and a lock so that several clients can share it.

    cache/v000007/                      exactly the published files
    cache/v000007.manifest.json         the version's signed manifest
    cache/.v000007.full/files/...       a stream in transfer: files of full size, filled in any order
    cache/.v000007.full/layout          names and sizes of the files

Invariant: a version with a manifest beside it is complete. It was verified before it got its name, and each process verifies
it again before first use. A folder without a manifest does not belong to the cache and is never touched. After a
restart, a partial stream's shards are hashed again, and wrong ones are fetched again.
Left out: leases. A caller that still reads a version older than the `keep` newest must keep its files open.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from shoal.files import discard, fsync, write_all, write_file
from shoal.shardcast.fetch import FetchError, disk_errors
from shoal.shardcast.files import StreamFiles
from shoal.shardcast.manifest import (
    FileEntry,
    Manifest,
    ManifestError,
    Newest,
    ShardEntry,
    SignedManifest,
    Stream,
    latest,
    parse_version,
    version_name,
)


class Partial:
    """A stream in transfer. If the disk fails, every method raises a FetchError that names the folder."""

    def __init__(self, folder: Path, files: Sequence[FileEntry], stream: Stream) -> None:
        """Resume from an earlier process's files, if they belong to the same stream."""
        self.folder, self.entries, self.shard_size_bytes = folder, list(files), stream.shard_size_bytes
        self.layout = StreamFiles(folder / "files", files)
        with disk_errors(folder):
            if self._can_resume():
                self.missing = list(self.layout.missing(stream))
            else:
                self._start()
                self.missing = stream.entries()

    @property
    def files(self) -> Path:
        return self.folder / "files"

    def sink(self, shard: ShardEntry) -> PartialShard:
        return PartialShard(self, shard)

    def _can_resume(self) -> bool:
        """Return whether an earlier process created all these files. The layout, which is written last, shows this."""
        try:
            same = (self.folder / "layout").read_bytes() == self._description()
        except FileNotFoundError:
            return False
        return same and self.layout.sizes_match()

    def _start(self) -> None:
        discard(self.folder)
        self.folder.mkdir(parents=True)
        try:
            for file in self.entries:
                path = self.files / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                _allocate(path, file.size_bytes)
        except OSError:
            discard(self.folder)  # free the space that was reserved
            raise
        write_file(self.folder / "layout", self._description())

    def _description(self) -> bytes:
        return json.dumps([[f.path, f.size_bytes] for f in self.entries]).encode()


class PartialShard:
    """A `download.ShardSink` that writes one shard into the files it covers."""

    def __init__(self, partial: Partial, shard: ShardEntry) -> None:
        self.partial, self._at_bytes = partial, shard.index * partial.shard_size_bytes
        # Only one file is open at a time, because a version may have more files than a process may open.
        self._open: tuple[Path, int] | None = None

    def write(self, offset_bytes: int, data: bytes) -> None:
        with disk_errors(self.partial.folder):
            view = memoryview(data)
            for path, at_bytes, size_bytes in self.partial.layout.ranges(self._at_bytes + offset_bytes, len(data)):
                write_all(self._file(path), view[:size_bytes], at_bytes)
                view = view[size_bytes:]

    def restart(self) -> None: ...

    def done(self) -> None: ...

    def close(self) -> None:
        if self._open:
            os.close(self._open[1])
            self._open = None

    def _file(self, path: Path) -> int:
        if self._open is None or self._open[0] != path:
            self.close()
            self._open = path, os.open(path, os.O_WRONLY)
        return self._open[1]


def _allocate(path: Path, size_bytes: int) -> None:
    """Reserve the space, so that a full disk fails before the download instead of at its end."""
    with path.open("wb") as file:
        if size_bytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        file.truncate(size_bytes)


POLL_S = 0.05
RESULTS = ("result", "result2")  # the passes of a chain of deltas write into these two folders in turn
TEMPORARY = ("full", "delta", *RESULTS)  # suffixes of an incomplete version's folders
Stamps = tuple[tuple[int, int, int], ...]
_VERIFIED: dict[Path, tuple[str, Stamps]] = {}  # each folder's digest and file stamps when this process verified it


class Cache:
    def __init__(self, path: Path, *, public_key: str, run: str | None, keep: int) -> None:
        if keep < 1:
            raise ValueError("keep must be at least 1")
        self.path, self.public_key, self.run, self.keep = path, public_key, run, keep

    def folder(self, version: int) -> Path:
        return self.path / version_name(version)

    def temporary(self, version: int, what: str) -> Path:
        return self.path / f".{version_name(version)}.{what}"

    def offer(self, version: int) -> tuple[SignedManifest, Manifest]:
        """Return the verified manifest of a cached version. Raise OSError, ManifestError."""
        signed = SignedManifest.parse(manifest_path(self.folder(version)).read_bytes())
        return signed, signed.open(self.public_key, run=self.run, version=version)

    def held(self, version: int, digest: str | None = None) -> tuple[Path, Manifest] | None:
        """Return a complete verified version; None if it is not cached, or if it does not have the given `digest`. Read
        and verify its files, unless this process has verified them and they have not changed since."""
        manifest = self.manifest(version, digest)
        if manifest is None:
            return None
        folder = self.folder(version)
        files = StreamFiles(folder, manifest.files)
        try:
            if _VERIFIED.get(folder.resolve()) != (manifest.digest, files.stamps()):
                if not files.match(manifest.content):
                    return None
                self._note_verified(manifest, files)
        except FileNotFoundError:  # another process has just replaced or removed it
            return None
        return folder, manifest

    def manifest(self, version: int, digest: str | None = None) -> Manifest | None:
        """Return the manifest of a cached version; None if a file has a wrong size, or if it does not have the given
        `digest`. Do not verify the files' contents. (If deltas are applied to the files, the result is verified.)"""
        try:
            _, manifest = self.offer(version)
        except (OSError, ManifestError):
            return None
        complete = StreamFiles(self.folder(version), manifest.files).sizes_match()
        return manifest if complete and digest in (None, manifest.digest) else None

    def _note_verified(self, manifest: Manifest, files: StreamFiles) -> None:
        _VERIFIED[self.folder(manifest.version).resolve()] = manifest.digest, files.stamps()

    def newest(self, now_s: float) -> Manifest | None:
        """Return the manifest of the newest complete version of the latest publication."""
        newest: Manifest | None = None
        for version in self.versions():
            if (manifest := self.manifest(version)) is None:  # it belongs to another run or key, or it is damaged
                continue
            best, other = Newest.of(newest) if newest else None, Newest.of(manifest)
            if best is None or (best.outdates(manifest) and latest(best, other, now_s) is other):
                newest = manifest
        return newest

    def check_free(self, version: int) -> None:
        """Raise FetchError if a folder that does not belong to the cache has this version's name."""
        folder = self.folder(version)
        if folder.exists() and not manifest_path(folder).is_file():
            raise FetchError(f"{folder} is not a fetched version; move it away, or choose another folder")

    def add(
        self, folder: Path, signed: SignedManifest, manifest: Manifest, *, written: Stream | None = None
    ) -> Path | None:
        """Verify the files in `folder` and rename it to its final name. If they are wrong, remove the folder and
        return None. `written` has the hashes computed while the files were written. Without it, the files are read."""
        files = StreamFiles(folder, manifest.files)
        right = files.match(manifest.content) if written is None else written == manifest.content
        if not (right and files.sizes_match()):
            discard(folder)
            return None
        final = self.folder(manifest.version)
        self.check_free(manifest.version)
        with disk_errors(self.path):
            for path in files.paths:
                fsync(path)
            for parent in {parent for path in files.paths for parent in path.parents if parent.is_relative_to(folder)}:
                fsync(parent)
            discard(final)
            write_file(manifest_path(final), signed.to_bytes())
            folder.rename(final)
            fsync(self.path)
        self._note_verified(manifest, StreamFiles(final, manifest.files))
        return final

    def versions(self) -> list[int]:
        """Return the cached versions, newest first."""
        folders = (path for path in self.path.iterdir() if manifest_path(path).is_file()) if self.path.is_dir() else ()
        return sorted((v for folder in folders if (v := parse_version(folder.name)) is not None), reverse=True)

    def drop(self, version: int) -> None:
        forget_verified(self.folder(version))
        discard(self.folder(version))
        manifest_path(self.folder(version)).unlink(missing_ok=True)

    def retain(self, current: int) -> None:
        """Keep `current`, the newest `keep` versions, and downloads of later versions. Remove everything else,
        including versions of other publications, which the origin has abandoned."""
        self._drop_outdated(current)
        for version in self.versions()[self.keep :]:
            if version != current:
                self.drop(version)
        for path in self.path.glob(".v*"):
            started_version, what = parse_version(path.name.split(".")[1]), path.name.split(".")[-1]
            if started_version is not None and started_version <= current and what in TEMPORARY:
                discard(path)

    def _drop_outdated(self, current: int) -> None:
        newest = read_manifest(self.folder(current))
        for version in self.versions():
            try:
                manifest = self.offer(version)[1]
            except (OSError, ManifestError):
                continue  # it belongs to another run or key
            if manifest.publication != newest.publication or (
                version > current and manifest.created_s < newest.created_s
            ):
                self.drop(version)

    def _remove_leftovers(self) -> None:
        """Remove files that a killed process left."""
        for path in self.path.glob(".v*"):
            version, what = parse_version(path.name.split(".")[1]), path.name.split(".")[-1]
            if version is not None and what == "gone":
                shutil.rmtree(path, ignore_errors=True)
            elif version is not None and path.name.endswith(".manifest.json.tmp"):
                path.unlink(missing_ok=True)

    @contextmanager
    def locked(self, deadline_s: float) -> Iterator[None]:
        """Let only one writer, of all threads and processes, use the cache. `deadline_s` is a time.monotonic() time."""
        lock = FileLock(self.path / ".lock", poll_interval=POLL_S)
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=max(deadline_s - time.monotonic(), 0.0))
            except Timeout as error:
                raise FetchError(f"another client holds {lock.lock_file}; stop it, or raise timeout_s") from error
        try:
            self._remove_leftovers()
            yield
        finally:
            lock.release()


def forget_verified(folder: Path) -> None:
    """Let the next use of a cached version verify its files again."""
    _VERIFIED.pop(folder.resolve(), None)


def manifest_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.manifest.json")


def read_manifest(folder: Path) -> Manifest:
    """Read a cached version's manifest without verifying it again. Raise OSError, ManifestError."""
    return SignedManifest.parse(manifest_path(folder).read_bytes()).unchecked()
