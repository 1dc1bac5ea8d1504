"""The origin: turns a folder of files into a published, signed version in a store.

Invariant: a version appears in versions.json only after all its shards and its manifest are on disk under
their final names; killed at any moment, the next `publish` of that version redoes what was half done and
repeats what was whole.
Called by the learner after an optimizer step; `server.app` serves the same store, in this process or another.
Left out: deltas against the previous version, and publishing from tensors in memory (the folder is what
resumes).
Paper: INTELLECT-2, SHARDCAST: the training node shards the checkpoint and announces it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from .manifest import (
    FileEntry,
    Manifest,
    ManifestError,
    ShardEntry,
    SignedManifest,
    check_paths,
    public_key_hex,
)
from .store import CHUNK_BYTES, NewFile, Store


class Origin:
    """One per store: the only writer of it."""

    def __init__(
        self,
        store: Path,
        key: Ed25519PrivateKey,
        *,
        run: str,
        shard_size_bytes: int = 32 << 20,
        keep: int = 5,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = Store(store)
        self.key = key
        self.run = run
        self.shard_size_bytes = shard_size_bytes
        self.keep = keep
        self.clock = clock
        self.store.recover()
        for version in self.published():
            self._held(version)  # a store of another run is refused here, not at the first step

    def published(self) -> list[int]:
        """Versions held, newest first."""
        return self.store.versions()

    def publish(self, folder: Path, version: int) -> Manifest:
        """Publishes every file under `folder` and returns the manifest. Blocks while it reads and writes it.

        A version that is held whole is left alone, whatever `folder` holds now: versions never change once
        published (compare `hash` of the returned manifest where that matters). Raises ManifestError for file
        names that cannot be published, ValueError for a version older than all kept, OSError from the disk.
        """
        held = self._held(version)
        if held is not None and not self.store.damaged(held):
            return held
        newer = [known for known in self.published() if known > version]
        if len(newer) >= self.keep:
            raise ValueError(f"version {version} is older than the {self.keep} kept ({newer}); raise keep")
        self.store.discard(version)
        # What was damaged on disk is cut anew with its old date: the same bytes get the same digest again.
        created_s = self.clock() if held is None else held.created_s
        manifest = self._cut(folder, version, created_s)
        self.store.add_manifest(version, SignedManifest.sign(manifest, self.key))
        self.store.retain(self.keep)
        return manifest

    def _held(self, version: int) -> Manifest | None:
        """The manifest held; None if there is none to be read. Raises ValueError if it is not ours."""
        try:
            signed = self.store.signed(version)
        except ManifestError:
            return None
        try:
            if signed is None:
                return None
            return signed.open(public_key_hex(self.key), run=self.run, version=version)
        except ManifestError as error:
            raise ValueError(f"{self.store.path} holds {error}; give each run and key its own store") from error

    def _cut(self, folder: Path, version: int, created_s: float) -> Manifest:
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in paths]
        check_paths(names)
        if not names:
            raise ManifestError(f"{folder} holds no files")
        self.store.folder(version).mkdir(parents=True)
        cutter = _Cutter(self.store, version, self.shard_size_bytes)
        try:
            files = [
                FileEntry(path=name, size_bytes=sum(map(cutter.add, _chunks(path))))
                for name, path in zip(names, paths, strict=True)
            ]
            cutter.finish_shard()
        finally:
            cutter.close()
        return Manifest(
            run=self.run,
            version=version,
            files=tuple(files),
            shard_size_bytes=self.shard_size_bytes,
            shards=tuple(cutter.shards),
            size_bytes=sum(file.size_bytes for file in files),
            hash=cutter.whole.hexdigest(),
            created_s=created_s,
        )


class _Cutter:
    """Takes a byte stream, leaves shard files, and hashes both in the same pass."""

    def __init__(self, store: Store, version: int, shard_size_bytes: int) -> None:
        self.store, self.version, self.shard_size_bytes = store, version, shard_size_bytes
        self.whole = blake3()
        self.shards: list[ShardEntry] = []
        self._file: NewFile | None = None
        self._hash, self._size_bytes = blake3(), 0

    def add(self, data: memoryview) -> int:
        size_bytes = len(data)
        self.whole.update(data)
        while data:
            piece = data[: self.shard_size_bytes - self._size_bytes]
            data = data[len(piece) :]
            if self._file is None:
                self._file = NewFile(self.store.shard_path(self.version, len(self.shards)))
            self._file.write(self._size_bytes, piece)
            self._hash.update(piece)
            self._size_bytes += len(piece)
            if self._size_bytes == self.shard_size_bytes:
                self.finish_shard()
        return size_bytes

    def finish_shard(self) -> None:
        if self._file is None:
            return
        self._file.commit()
        self.close()
        self.shards.append(ShardEntry(index=len(self.shards), size_bytes=self._size_bytes, hash=self._hash.hexdigest()))
        self._hash, self._size_bytes = blake3(), 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _chunks(path: Path) -> Iterator[memoryview]:
    """The file's bytes; each view is valid until the next."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size_bytes := file.readinto(buffer):
            yield buffer[:size_bytes]
