"""The origin: publishes a folder of files as a signed version in a store, in full or as a delta.

Every `anchor_every`-th version is an anchor, which can be fetched in full. Each other version is a delta of the version
before. An anchor also has a delta, for readers of the version before. If a delta would save less than half, the version
becomes an anchor.

Invariant: a version appears in versions.json only with a signed manifest, and each shard that the manifest names is on
disk under its final name. After a crash at any moment, the next `publish` of the version redoes unfinished work and
reproduces finished work identically.
Called by the origin process after an optimizer step; `server.app` serves the same store.
Left out: deltas across more than one version (a client chains them).
Paper: INTELLECT-2 (arXiv 2505.07291), SHARDCAST: the training node shards the checkpoint and announces it.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.files import CHUNK_BYTES, NewFile, discard, new_file
from shoal.shardcast import delta
from shoal.shardcast.contents import PublishError, check_apart, file_chunks, file_times, files_at
from shoal.shardcast.delta import Files, Folder
from shoal.shardcast.files import Cutter, LayoutError, StreamFiles, alongside, cut
from shoal.shardcast.growing import TEMPORARY, GivenUpError, Growing
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
    parse_version,
    public_key_hex,
    version_name,
)
from shoal.shardcast.store import Store, StoreFullError, chain

STATE_S = 5.0  # between two statements that say the same


class Statement:
    def __init__(self, store: Store, key: Ed25519PrivateKey, run: str, clock: Callable[[], float]) -> None:
        self.store, self.key, self.run, self.clock = store, key, run, clock
        signed = store.newest
        self._said = signed.open(public_key_hex(key), run=run) if signed else None

    def renew(self, newest: Manifest) -> None:
        """Says that this is the newest version; at most every STATE_S, unless that changed."""
        said, now_s = self._said, self.clock()
        serial = int(now_s * 1e6)  # also a store that was restored from a backup continues after what it stated
        if said is not None:
            same = (said.publication, said.version) == (newest.publication, newest.version)
            if same and said.as_of_s <= now_s < said.as_of_s + STATE_S:
                return
            serial = max(serial, said.serial + 1)
        self._said = Newest.of(newest).model_copy(update={"serial": serial, "as_of_s": now_s})
        self.store.state(SignedNewest.sign(self._said, self.key))


def shard_bytes(size_bytes: int, wanted_bytes: int | None) -> int:
    """The size of a stream's shards. None wanted: small enough to spread a version over many connections, large enough to
    make requests cheap. Raises PublishError if the stream is too long, or its shards too many."""
    unit = 64 << 10
    found = wanted_bytes or min(max(-(-size_bytes // (256 * unit)) * unit, unit), 16 << 20)
    if size_bytes > MAX_SIZE_BYTES:
        raise PublishError(f"a version of {size_bytes} bytes is larger than {MAX_SIZE_BYTES}; publish it in parts")
    if (shards := -(-size_bytes // found)) > MAX_SHARDS:
        raise PublishError(
            f"{size_bytes} bytes make {shards} shards of {found}, and a version has at most {MAX_SHARDS}; "
            f"raise the shard size to {-(-size_bytes // MAX_SHARDS)} bytes or more"
        )
    return found


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


DRAFT_S = 0.2  # between two manifests of a growing version


@dataclass(frozen=True)
class _Found:
    """What one pass over a version's files made."""

    content: Stream
    delta: Delta | None  # None: it would save nothing, or does not fit
    anchor: bool  # whether the shards of the content were written


class Origin:
    """The only writer of its store."""

    def __init__(
        self,
        store: Store | Path,
        key: Ed25519PrivateKey,
        *,
        run: str,
        shard_size_bytes: int | None = None,
        anchor_every: int = 10,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`shard_size_bytes` None: a size that makes about 256 shards of a version."""
        self.store = store if isinstance(store, Store) else Store(store)
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
        self.publication = newest.publication if newest else secrets.token_hex(16)  # an empty store begins another one
        self._created_s = max((manifest.created_s for manifest in self._held.values()), default=0.0)
        self._latest = Latest(self.store.path / ".latest")
        self._statement = Statement(self.store, key, run, clock)

    def published(self) -> list[int]:
        return self.store.versions()

    def state(self) -> None:
        """Signs what the newest version is, if that is due. Servers call this all the time."""
        newest = max(self._held.values(), key=lambda manifest: manifest.version, default=None)
        if newest is not None:
            self._statement.renew(newest)

    def next_version(self) -> int:
        return max(self._held, default=-1) + 1

    def publish(self, path: Path, version: int) -> Manifest:
        """Publishes a file, or every file under a folder, and returns the manifest. Blocks while it reads and writes.

        A version that is already complete is returned unchanged, whatever is at `path`: published versions never change.
        Raises ManifestError for file names that cannot be published; PublishError for a private key, a store inside
        `path`, a version older than all kept ones or a folder that changes meanwhile; OSError from the disk.
        """
        check_apart(path, self.store.path)
        held = self._held.get(version)
        if held is not None and held.complete and not self.store.missing(held):
            return held
        folder, files = files_at(path)
        before = file_times(folder, files)
        # A version damaged on disk is published again with its old date, so that it gets the same digest.
        created_s = self._later() if held is None else held.created_s
        self._shard_bytes(_total(files))  # refuses too many shards before any is written
        with self._begun(version):
            parent = self._parent_of(version)
            found = self._compare(Folder(folder), files, version, parent) if parent else None
            self._add(version, folder, files, found, created_s)
            if file_times(folder, files) != before:
                raise PublishError(
                    f"{path} was modified while it was published; move complete versions there by a rename"
                )
        return self._published(version, folder)

    def follow(self, growing: Growing) -> Manifest:
        """Publishes a version while it is being written. Without a parent to make a delta of, it is served meanwhile.
        Otherwise its delta, hashes and shards are made meanwhile, and it is served when its folder is complete.
        Raises GivenUpError and then leaves nothing of it, and what `publish` raises."""
        version, files = growing.version, growing.files
        if version in self._held and self._held[version].complete:
            raise PublishError(f"version {version} is already published, and versions never change")
        check_apart(growing.folder, self.store.path)
        self._shard_bytes(_total(files))
        with self._begun(version):
            parent = self._parent_of(version)
            if parent is None:
                with self.stream(version, files) as write:
                    for chunk in growing.chunks():
                        write(chunk)
                    folder = growing.finish()
            else:
                found = self._compare(growing, files, version, parent)
                folder = growing.finish()
                self._add(version, folder, files, found, self._later())
        return self._published(version, folder)

    def _add(
        self, version: int, folder: Path, files: Sequence[FileEntry], found: _Found | None, created_s: float
    ) -> None:
        """Publishes what `_compare` found. If that is too little, reads the files to make an anchor."""
        delta = found.delta if found else None
        saves_much = delta is not None and 2 * delta.stream.size_bytes <= _total(files)
        if found and (found.anchor or saves_much):
            self._sign(version, files, found.content, delta, created_s, anchor=found.anchor)
            return
        with self.stream(version, files, delta=delta, created_s=created_s) as write:
            for chunk in file_chunks(folder, files):
                write(chunk)

    def _published(self, version: int, folder: Path) -> Manifest:
        manifest = self._held[version]
        self._latest.keep(folder, manifest)
        self.store.retain(self._held)
        self._forget_dropped()
        return manifest

    def _parent_of(self, version: int) -> Manifest | None:
        parent = self._latest.manifest(self._held)
        return parent if parent is not None and parent.version < version else None

    @contextmanager
    def stream(
        self,
        version: int,
        files: Sequence[FileEntry],
        *,
        delta: Delta | None = None,
        created_s: float | None = None,
    ) -> Iterator[Callable[[memoryview], None]]:
        """Publishes an anchor while it is being written. The block gets a function that takes the bytes of `files`, in
        order. They are served within `DRAFT_S`. Raises PublishError unless all bytes were passed."""
        if version in self._held:
            raise PublishError(f"version {version} is already published, and versions never change")
        created_s = self._later() if created_s is None else created_s
        total_bytes = _total(files)
        size_bytes = self._shard_bytes(total_bytes)
        self._make_room(version, (), total_bytes + (delta.stream.size_bytes if delta else 0))
        cutter = Cutter(size_bytes, self._new_shard(version))
        drafted_s = time.monotonic()

        def sign(delta: Delta | None) -> None:
            content = Stream(size_bytes=total_bytes, shard_size_bytes=size_bytes, shards=tuple(cutter.shards))
            self._sign(version, files, content, delta, created_s, anchor=True)

        def write(data: memoryview) -> None:
            nonlocal drafted_s
            if cutter.taken_bytes + len(data) > total_bytes:
                raise PublishError(f"version {version} is longer than its {total_bytes} bytes")
            cutter.add(data)
            if time.monotonic() - drafted_s > DRAFT_S and cutter.taken_bytes < total_bytes:
                sign(None)
                drafted_s = time.monotonic()

        try:
            yield write
            cutter.finish()
            if cutter.taken_bytes != total_bytes:
                raise PublishError(f"version {version} ended after {cutter.taken_bytes} of its {total_bytes} bytes")
        except BaseException:
            self._forget(version)
            raise
        finally:
            cutter.close()
        sign(delta)

    def _compare(self, source: Files, files: Sequence[FileEntry], version: int, parent: Manifest) -> _Found:
        """Makes the delta from the last published version, the hashes and, if an anchor is due, its shards. Reads the files
        once, front to back."""
        anchor, total_bytes = self._anchor_is_due(parent.version), _total(files)
        if anchor:
            self._make_room(version, (), total_bytes)
        size_bytes = self._shard_bytes(total_bytes)
        cutter = Cutter(size_bytes, self._new_shard(version) if anchor else None)
        try:
            with alongside(cutter.add) as passed:
                delta = self._encode(source, files, version, parent, passed, anchor_bytes=anchor * total_bytes)
            cutter.finish()
        finally:
            cutter.close()
        content = Stream(size_bytes=total_bytes, shard_size_bytes=size_bytes, shards=tuple(cutter.shards))
        return _Found(content, delta, anchor)

    def _encode(
        self,
        source: Files,
        files: Sequence[FileEntry],
        version: int,
        parent: Manifest,
        passed: Callable[[memoryview], None],
        *,
        anchor_bytes: int,
    ) -> Delta | None:
        """Writes the delta from the last published version, and its shards. Returns None if it saves nothing, or does not
        fit. `anchor_bytes`: of the anchor that is being written at the same time."""
        needs = [] if anchor_bytes else chain(self._held, parent.version)
        with new_file(self.store.path / "delta") as file:
            size_bytes, fits = 0, True

            def sink(data: bytes) -> None:
                nonlocal size_bytes, fits
                try:
                    if fits:
                        self._make_room(version, needs, anchor_bytes + 2 * (size_bytes + len(data)))  # file and shards
                        file.write(size_bytes, data)
                        size_bytes += len(data)
                except StoreFullError:
                    fits = False  # with its parents; the full version alone may, and `passed` needs all of it

            delta.encode(self._latest.folder, source, [entry.path for entry in files], sink, passed)
            if not fits or size_bytes >= _total(files):
                return None
            chunks = (memoryview(file.read(at, CHUNK_BYTES)) for at in range(0, size_bytes, CHUNK_BYTES))
            stream = cut(chunks, size_bytes, self._shard_bytes(size_bytes), self._new_shard(version, "delta"))
        return Delta(parent=parent.version, parent_digest=parent.digest, stream=stream)

    def _anchor_is_due(self, parent: int) -> bool:
        deltas = 0
        while (manifest := self._held.get(parent)) and not manifest.anchor and manifest.delta:
            parent, deltas = manifest.delta.parent, deltas + 1
        return manifest is None or deltas + 1 >= self.anchor_every

    def _sign(
        self,
        version: int,
        files: Sequence[FileEntry],
        content: Stream,
        delta: Delta | None,
        created_s: float,
        *,
        anchor: bool,
    ) -> None:
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

    def _later(self) -> float:
        """The time, but later than that of every manifest before, whatever the clock does."""
        self._created_s = max(self.clock(), math.nextafter(self._created_s, math.inf))
        return self._created_s

    @contextmanager
    def _begun(self, version: int) -> Iterator[None]:
        newer = [known for known in self._held if known > version]
        if len(newer) >= self.store.keep:
            raise PublishError(f"version {version} is older than the {self.store.keep} kept ({newer}); raise keep")
        for known in [known for known, manifest in self._held.items() if known < version and not manifest.complete]:
            self._forget(known)  # its writer died, and nobody can complete it
        self._forget(version)
        try:
            yield
        except BaseException:
            self._forget(version)
            raise

    def _make_room(self, version: int, needs: Sequence[int], more_bytes: int) -> None:
        self.store.make_room(self._held, version, needs, more_bytes)
        self._forget_dropped()

    def _forget_dropped(self) -> None:
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
        """The stored manifest; None if it is missing or unreadable. Raises PublishError if it is not ours."""
        try:
            signed = self.store.signed(version)
        except ManifestError:
            return None
        try:
            if signed is None:
                return None
            return signed.open(public_key_hex(self.key), run=self.run, version=version)
        except ManifestError as error:
            raise PublishError(f"{self.store.path} holds {error}; give each run and key its own store") from error


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


def _total(files: Sequence[FileEntry]) -> int:
    return sum(file.size_bytes for file in files)
