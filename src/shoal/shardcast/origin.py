"""The origin: publish a folder of files as a signed version in a store, in full or as a delta.

Every `anchor_every`-th version is an anchor, which can be fetched in full. Each version also has a delta from the
version published before it, unless the delta is as large as the files. If the delta has more than half their size, the
version becomes an anchor.

Invariant: a file that looks like a private key in text form, or is named like one, is never published, even through a
symbolic link. A link is followed only if its target is inside the folder, or inside the Hugging Face cache entry that
the folder is a snapshot of. Files and folders whose names start with a dot are not published.
A version is listed in versions.json only after its signed manifest and all its shards are on disk. After a crash at any
moment, publishing the version again completes it with the same digest.
`server.app` serves the origin's store.
Left out: deltas across more than one version, because a client applies several in a row; and detection of private keys
in binary formats, or after the first 64 KiB of a file.
Paper: INTELLECT-2 (arXiv 2505.07291), SHARDCAST: the training node shards the checkpoint and announces it.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.errors import ShoalError
from shoal.files import CHUNK_BYTES, NewFile, discard, new_file
from shoal.shardcast import delta
from shoal.shardcast.delta import DeltaError
from shoal.shardcast.files import Cutter, LayoutError, StreamFiles, alongside, cut
from shoal.shardcast.manifest import (
    MAX_SHARDS,
    MAX_SIZE_BYTES,
    Delta,
    FileEntry,
    Manifest,
    ManifestError,
    Newest,
    Part,
    SignedManifest,
    SignedNewest,
    Stream,
    check_paths,
    parse_version,
    public_key_hex,
    version_name,
)
from shoal.shardcast.store import ShardStore

ANCHOR_EVERY = 10  # one of this many versions is an anchor
KEY_NAMES = {"identity.pem", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk"}
KEY_TEXT = re.compile(rb"^[ \t]*-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----", re.MULTILINE)
SCANNED_BYTES = 64 << 10


class PublishError(ShoalError, ValueError):
    """A folder cannot be published."""


def check_apart(path: Path, store: Path, *keys: Path) -> None:
    """Raise PublishError if the store or a private key lies inside the folder to publish, or is the file to publish."""
    published = path.resolve()
    if store.resolve().is_relative_to(published):
        raise PublishError(f"the store {store} lies inside {path}, which is published; choose a store outside of it")
    for key in keys:
        if key.resolve().is_relative_to(published):
            raise PublishError(f"the key file {key} lies inside {path}, which is published; keep the key outside of it")


def files_at(path: Path) -> tuple[Path, list[FileEntry]]:
    """Return the folder and its files to publish, in order: all of them, or the one file that `path` names.
    Raise ManifestError, PublishError."""
    folder = path.resolve() if path.is_dir() else path.parent
    paths = _files_in(folder) if path.is_dir() else [path]
    check_paths([file.relative_to(folder).as_posix() for file in paths])  # raises before any file is read
    if not paths:
        raise ManifestError(f"{folder} has no files; put the files to publish there")
    return folder, [_entry(file, folder) for file in paths]


def _entry(path: Path, folder: Path) -> FileEntry:
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if {path.name, path.resolve().name} & KEY_NAMES or KEY_TEXT.search(file.read(SCANNED_BYTES)):
            raise PublishError(
                f"{path} looks like a private key; move it out of the published folder, then publish again"
            )
    _refuse_stray_link(path, folder)
    return FileEntry(path=path.relative_to(folder).as_posix(), size_bytes=size_bytes)


def file_times(folder: Path, files: Sequence[FileEntry]) -> list[int]:
    return [(folder / file.path).stat().st_mtime_ns for file in files]


def file_chunks(folder: Path, files: Sequence[FileEntry]) -> Iterator[memoryview]:
    """Yield the files' bytes. Each view is valid until the next one."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for file_entry in files:
        with (folder / file_entry.path).open("rb", buffering=0) as file:
            while size_bytes := file.readinto(buffer):
                yield buffer[:size_bytes]


def _files_in(folder: Path) -> list[Path]:
    paths = []
    for path in sorted(folder.rglob("*")):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        if path.is_symlink() and path.is_dir():
            raise PublishError(
                f"{path} is a link to a folder; replace it with the folder's files, or publish that folder"
            )
        if path.is_symlink() and not path.exists():
            raise PublishError(
                f"{path} is a link to {path.readlink()}, which is missing; restore it or remove the link"
            )
        if path.is_file():
            paths.append(path)
    return paths


def _refuse_stray_link(path: Path, folder: Path) -> None:
    if not path.is_symlink():
        return
    target, folder = path.resolve(), folder.resolve()
    # Hugging Face's cache: models--org--name/snapshots/REVISION/config.json -> ../../blobs/HASH
    blobs = [folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else []
    if not any(target.is_relative_to(allowed) for allowed in [folder, *blobs]):
        raise PublishError(f"{path} is a link to {target}, outside of {folder}; put a copy in its place")


def digest_of(path: Path, run: str, version: int) -> str:
    """Return the digest of the manifest with which an origin publishes these files, in shards of the default size.

    Raise ManifestError, PublishError.
    """
    folder, files = files_at(path)
    total_bytes = _total(files)
    content = cut(file_chunks(folder, files), total_bytes, shard_bytes(total_bytes, None), None)
    return Manifest.model_construct(run=run, version=version, files=tuple(files), content=content).digest


STATE_S = 5.0  # time between two signed statements while the newest version stays the same


def shard_bytes(size_bytes: int, wanted_bytes: int | None) -> int:
    """Return a stream's shard size: `wanted_bytes`, or by default about 256 shards of at most 16 MiB. Raise PublishError if
    the stream is too long or has too many shards."""
    unit = 64 << 10
    shard_size_bytes = wanted_bytes or min(max(-(-size_bytes // (256 * unit)) * unit, unit), 16 << 20)
    if size_bytes > MAX_SIZE_BYTES:
        raise PublishError(f"a version of {size_bytes} bytes is larger than {MAX_SIZE_BYTES}; publish it in parts")
    if (shards := -(-size_bytes // shard_size_bytes)) > MAX_SHARDS:
        raise PublishError(
            f"{size_bytes} bytes make {shards} shards of {shard_size_bytes}, and a version has at most {MAX_SHARDS}; "
            f"raise the shard size to {-(-size_bytes // MAX_SHARDS)} bytes or more"
        )
    return shard_size_bytes


class Latest:
    """A copy of the last published version, from which deltas are made. It consists of hard links if possible."""

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
                os.link((folder / file.path).resolve(), target / file.path)  # links to files, never to symbolic links
            except OSError:  # the folder is on another device, or its file system has no hard links
                shutil.copyfile(folder / file.path, target / file.path)
        self._known = manifest.version, file_times(target, manifest.files)

    def manifest(self, held: dict[int, Manifest]) -> Manifest | None:
        """Return the manifest of the version stored here. Return None if its files have changed."""
        version = parse_version(self.folder.name)
        manifest = None if version is None else held.get(version)
        if manifest is None:
            return None
        try:
            if self._known == (version, file_times(self.folder, manifest.files)):
                return manifest
        except FileNotFoundError:
            return None
        # An earlier process left these files, or somebody modified them, so compare the contents.
        return manifest if StreamFiles(self.folder, manifest.files).match(manifest.content) else None


class Origin:
    """The only writer of its store."""

    def __init__(
        self,
        store: ShardStore | Path,
        key: Ed25519PrivateKey,
        *,
        run: str,
        shard_size_bytes: int | None = None,
        anchor_every: int = ANCHOR_EVERY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """If `shard_size_bytes` is None, a version has about 256 shards."""
        self.store = store if isinstance(store, ShardStore) else ShardStore(store)
        self.key = key
        self.run = run
        self.shard_size_bytes = shard_size_bytes
        self.anchor_every = anchor_every
        self.clock = clock
        self.store.lock()
        self.store.recover()
        self.store.reached_via(())
        self._held = {v: manifest for v in self.store.versions() if (manifest := self._open(v))}
        newest = max(self._held.values(), key=lambda manifest: manifest.version, default=None)
        # An origin with an empty store starts another publication.
        self.publication = newest.publication if newest else secrets.token_hex(16)
        self._created_s = max((manifest.created_s for manifest in self._held.values()), default=0.0)
        self._latest = Latest(self.store.path / ".latest")
        signed = self.store.newest
        self._stated = signed.open(public_key_hex(key), run=run) if signed else None

    def published(self) -> list[int]:
        return self.store.versions()

    def state(self) -> None:
        """Sign a statement if the newest version changed or STATE_S passed. Call this often while serving."""
        newest = max(self._held.values(), key=lambda manifest: manifest.version, default=None)
        if newest is None:
            return
        last, now_s = self._stated, self.clock()
        serial = int(now_s * 1e6)  # made from the time, so that it increases even if the store comes from a backup
        if last is not None:
            same = (last.publication, last.version) == (newest.publication, newest.version)
            if same and last.as_of_s <= now_s < last.as_of_s + STATE_S:
                return
            serial = max(serial, last.serial + 1)
        self._stated = Newest.of(newest).model_copy(update={"serial": serial, "as_of_s": now_s})
        self.store.state(SignedNewest.sign(self._stated, self.key))

    def next_version(self) -> int:
        return max(self._held, default=-1) + 1

    def publish(self, path: Path, version: int) -> Manifest:
        """Publish a file, or every file under a folder. Return the manifest. This blocks while it reads and writes.

        If the version is already complete, return its manifest, because published versions never change.
        Raise ManifestError for file names that cannot be published; PublishError for a private key, a store inside
        `path`, a version older than all kept ones or a folder that changes during publication; OSError from the disk.
        """
        check_apart(path, self.store.path)
        held = self._held.get(version)
        if held is not None and not self.store.missing(held):
            return held
        folder, files = files_at(path)
        before = file_times(folder, files)
        # A version damaged on disk keeps its date, so that clients do not take the repaired version for a later one.
        created_s = self._later() if held is None else held.created_s
        self._shard_bytes(_total(files))  # raises before any shard is written
        modified = f"{path} was modified while it was published; write a version elsewhere, then rename it to this path"
        with self._publishing(version):
            try:
                content, delta, anchor = self._cut(version, folder, files)
            except (DeltaError, LayoutError) as error:
                raise PublishError(modified) from error
            if file_times(folder, files) != before:
                raise PublishError(modified)
            manifest = Manifest(
                run=self.run,
                publication=self.publication,
                version=version,
                files=tuple(files),
                content=content,
                anchor=anchor,
                delta=delta,
                created_s=created_s,
            )
            self.store.add_manifest(version, SignedManifest.sign(manifest, self.key))
            self._held[version] = manifest
            self.state()
        self._latest.keep(folder, manifest)
        self.store.retain(self._held)
        self._drop_manifests()
        return manifest

    def _cut(self, version: int, folder: Path, files: Sequence[FileEntry]) -> tuple[Stream, Delta | None, bool]:
        """Write the shards of a version. Return its content, its delta if there is one, and whether it is an anchor."""
        parent = self._latest.manifest(self._held)
        if parent is None or parent.version >= version:
            return self._cut_anchor(version, folder, files), None, True
        content, delta, anchor = self._compare(version, folder, files, parent)
        if not anchor and (delta is None or 2 * delta.stream.size_bytes > _total(files)):
            return self._cut_anchor(version, folder, files), delta, True
        return content, delta, anchor

    def _cut_anchor(self, version: int, folder: Path, files: Sequence[FileEntry]) -> Stream:
        total_bytes, chunks = _total(files), file_chunks(folder, files)
        return cut(chunks, total_bytes, self._shard_bytes(total_bytes), self._new_shard(version))

    def _compare(
        self, version: int, folder: Path, files: Sequence[FileEntry], parent: Manifest
    ) -> tuple[Stream, Delta | None, bool]:
        """Make the delta from the last published version, and hash the content. If an anchor is due, also write the
        anchor's shards. Read the files once, sequentially."""
        anchor, total_bytes = self._anchor_is_due(parent.version), _total(files)
        cutter = Cutter(self._shard_bytes(total_bytes), self._new_shard(version) if anchor else None)
        try:
            with alongside(cutter.add) as on_read:
                delta = self._encode(folder, files, version, parent, on_read)
            return cutter.finish(total_bytes), delta, anchor
        finally:
            cutter.close()

    def _encode(
        self,
        folder: Path,
        files: Sequence[FileEntry],
        version: int,
        parent: Manifest,
        on_read: Callable[[memoryview], None],
    ) -> Delta | None:
        """Write the shards of the delta from the last published version. Return None if it saves nothing."""
        with new_file(self.store.path / "delta") as file:
            size_bytes = 0

            def sink(data: bytes) -> None:
                nonlocal size_bytes
                file.write(size_bytes, data)
                size_bytes += len(data)

            delta.encode(self._latest.folder, folder, [entry.path for entry in files], sink, on_read)
            if size_bytes >= _total(files):
                return None
            chunks = (memoryview(file.read(at, CHUNK_BYTES)) for at in range(0, size_bytes, CHUNK_BYTES))
            stream = cut(chunks, size_bytes, self._shard_bytes(size_bytes), self._new_shard(version, "delta"))
        return Delta(parent=parent.version, parent_digest=parent.digest, stream=stream)

    def _anchor_is_due(self, parent: int) -> bool:
        deltas = 0
        while (manifest := self._held.get(parent)) and not manifest.anchor and manifest.delta:
            parent, deltas = manifest.delta.parent, deltas + 1
        return manifest is None or deltas + 1 >= self.anchor_every

    def _later(self) -> float:
        """Return a date for the next manifest: the current time, or if needed just after the date of the latest one."""
        self._created_s = max(self.clock(), math.nextafter(self._created_s, math.inf))
        return self._created_s

    @contextmanager
    def _publishing(self, version: int) -> Iterator[None]:
        newer = [known for known in self._held if known > version]
        if len(newer) >= self.store.keep:
            raise PublishError(
                f"version {version} is older than the {self.store.keep} kept versions ({newer}); raise keep"
            )
        self._forget(version)
        try:
            yield
        except BaseException:
            self._forget(version)
            raise

    def _drop_manifests(self) -> None:
        kept = self.store.versions()
        self._held = {version: manifest for version, manifest in self._held.items() if version in kept}

    def _forget(self, version: int) -> None:
        self.store.discard(version)
        self._held.pop(version, None)

    def _new_shard(self, version: int, part: Part = "full") -> Callable[[int], NewFile]:
        return lambda index: self.store.new_shard(version, part, index)

    def _shard_bytes(self, size_bytes: int) -> int:
        return shard_bytes(size_bytes, self.shard_size_bytes)

    def _open(self, version: int) -> Manifest | None:
        """Return the stored manifest, or None if it cannot be read. Raise PublishError if another key signed it."""
        try:
            signed = self.store.signed(version)
        except ManifestError:
            return None
        try:
            if signed is None:
                return None
            return signed.open(public_key_hex(self.key), run=self.run, version=version)
        except ManifestError as error:
            raise PublishError(
                f"cannot continue the store {self.store.path}: {error}; give each run and key its own store"
            ) from error


def _total(files: Sequence[FileEntry]) -> int:
    return sum(file.size_bytes for file in files)
