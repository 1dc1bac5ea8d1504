"""The folder of published versions of an origin or relay: plain files that nginx could serve.

    versions.json                {"versions": [newest, ..., oldest], "path": [origin's id, ..., own id]}
    v000007/manifest.json        the signed manifest
    v000007/full/00000.shard     shards of the content, if the version is an anchor
    v000007/delta/00000.shard    shards of the delta, if the version has one

Invariant: a shard under its final name is complete and never changes. While it arrives it has a temporary name, under
which the server can already read it. A manifest is replaced only by a later one, or by one that offers the same
content in other shards. versions.json can be rebuilt after a crash, because it lists the newest MAX_VERSIONS folders
that have a manifest. The writing process holds the store's lock.
The origin or relay (its only writer) and the server (a reader) share one `ShardStore` in one process.
Left out: object storage, and several writers of one store.
Paper: INTELLECT-2, SHARDCAST (relays keep the last five versions).
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from math import inf
from pathlib import Path

from blake3 import blake3
from filelock import FileLock, Timeout

from shoal.errors import ShoalError
from shoal.files import CHUNK_BYTES, NewFile, discard, remove_leftovers, write_file
from shoal.shardcast.manifest import (
    MAX_VERSIONS,
    Listing,
    Manifest,
    Part,
    ShardEntry,
    SignedManifest,
    SignedNewest,
    parse_version,
    shard_name,
    version_name,
)

KEEP = 5  # newest versions to keep, as INTELLECT-2's relays do; the parents of their deltas are kept too
FILE_MODE, FOLDER_MODE = 0o644, 0o755  # a public store has these modes, so that another user's nginx can serve it
# Held locks by process and store. The process id is needed, because a forked child does not hold its parent's locks.
_LOCKS: dict[tuple[int, Path], FileLock] = {}


class ShardStore:
    def __init__(self, path: Path, *, keep: int = KEEP, lease_s: float = 60.0, public: bool = True) -> None:
        """Keep the newest `keep` versions and the parents of their deltas. Also keep the newest `keep` of the older
        versions that were read within `lease_s`; if all were kept, readers could fill the disk. If `public`, every user
        of this machine may read the store, whatever the umask."""
        self.path, self.file_mode = path, FILE_MODE if public else None
        self.keep, self.lease_s = keep, lease_s
        self.pinned: Set[int] = frozenset()  # older versions to keep
        self._requested_s: dict[int, float] = {}
        self._via: tuple[str, ...] | None = None
        self.newest: SignedNewest | None = None  # the origin's latest statement that this store has

    def lock(self) -> None:
        """Make this process the store's only writer until `unlock` or exit. Raise ShoalError if there is another."""
        self._make_folder(self.path)
        place = os.getpid(), self.path.resolve()
        if place in _LOCKS:
            return
        lock = FileLock(self.path / ".lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ShoalError(
                f"another origin or relay writes {self.path}; stop it, or give this one its own store"
            ) from error
        _LOCKS[place] = lock

    def unlock(self) -> None:
        if lock := _LOCKS.pop((os.getpid(), self.path.resolve()), None):
            lock.release()

    @cached_property
    def id(self) -> str:
        """The store's permanent random id. Relays learn from the ids in listings which server fetches from which."""
        path = self.path / "id"
        if not path.is_file():
            self._make_folder(self.path)
            write_file(path, secrets.token_hex(8).encode())
        return path.read_text()

    def reached_via(self, path: Sequence[str]) -> None:
        """Set the path in versions.json: the ids of the stores from the origin to the one before this store."""
        if tuple(path) != self._via:
            self._via = tuple(path)
            self._list(self.versions())

    def state(self, newest: SignedNewest | None) -> None:
        """Replace the origin's statement in versions.json."""
        if newest != self.newest:
            self.newest = newest
            self._list(self.versions())

    def folder(self, version: int) -> Path:
        return self.path / version_name(version)

    def manifest_path(self, version: int) -> Path:
        return self.folder(version) / "manifest.json"

    def shard_path(self, version: int, part: Part, index: int) -> Path:
        return self.folder(version) / shard_name(part, index)

    def new_shard(self, version: int, part: Part, index: int) -> NewFile:
        path = self.shard_path(version, part, index)
        self._make_folder(path.parent)
        return NewFile(path, mode=self.file_mode)

    def lease(self, version: int) -> None:
        """Renew the lease of a version that a reader requests."""
        self._requested_s[version] = time.monotonic()

    def versions(self) -> list[int]:
        """Return the listed versions, newest first."""
        try:
            return list(Listing.model_validate_json((self.path / "versions.json").read_bytes()).versions)
        except FileNotFoundError:
            return []

    def signed(self, version: int) -> SignedManifest | None:
        """Return the stored manifest, or None if there is none. Raise ManifestError if it is damaged."""
        try:
            return SignedManifest.parse(self.manifest_path(version).read_bytes())
        except FileNotFoundError:
            return None

    def missing(self, manifest: Manifest) -> list[tuple[Part, ShardEntry]]:
        """Return the shards that are absent or have a wrong hash, deltas first. This reads every stored byte."""
        return [
            (part, shard)
            for part, stream in sorted(manifest.streams.items())
            for shard in stream.entries()
            if not self._matches(manifest.version, part, shard)
        ]

    def add_manifest(self, version: int, signed: SignedManifest) -> None:
        """Store the manifest and list the version in versions.json."""
        self._make_folder(self.folder(version))
        write_file(self.manifest_path(version), signed.to_bytes(), mode=self.file_mode)
        self._list(self._on_disk())

    def retain(self, held: Mapping[int, Manifest]) -> None:
        """Remove all versions except those that `wanted` returns. `held` has the manifests of all stored versions.
        Readers can still read files that they have opened."""
        wanted = self.wanted(held)
        self._list([version for version in sorted(held, reverse=True) if version in wanted])
        for version in self._on_disk():
            if version not in wanted:
                discard(self.folder(version))
                self._requested_s.pop(version, None)

    def wanted(self, held: Mapping[int, Manifest]) -> set[int]:
        """Return the versions to keep: the newest, pinned and leased ones, and their parents."""
        wanted: set[int] = set()
        now_s, leases = time.monotonic(), self.keep
        for place, version in enumerate(sorted(held, reverse=True)):
            leased = leases > 0 and now_s - self._requested_s.get(version, -inf) < self.lease_s
            leases -= leased and place >= self.keep
            if place < self.keep or leased or version in self.pinned:
                wanted |= set(chain(held, version))
        return wanted

    def discard(self, version: int) -> None:
        """Remove one version, complete or not."""
        self._list([held for held in self._on_disk() if held != version])
        discard(self.folder(version))

    def recover(self) -> None:
        """Repair the store after its writer was killed. Only the writer may call this."""
        self._make_folder(self.path)
        remove_leftovers(self.path)
        self.newest = self._stated()
        for folder in self.path.iterdir():
            if parse_version(folder.name) is not None:
                for place in (folder, folder / "full", folder / "delta"):
                    remove_leftovers(place)
                if not (folder / "manifest.json").is_file():
                    discard(folder)
        self._list(self._on_disk())

    def _matches(self, version: int, part: Part, shard: ShardEntry) -> bool:
        try:
            with self.shard_path(version, part, shard.index).open("rb") as file:
                if os.fstat(file.fileno()).st_size != shard.size_bytes:
                    return False
                digest = blake3()
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
        except FileNotFoundError:
            return False
        return digest.hexdigest() == shard.hash

    def _make_folder(self, folder: Path) -> None:
        """Make the folder and those of its parents that are the store's folder or lie in it."""
        for parent in reversed([folder, *folder.parents]):
            if not parent.is_relative_to(self.path):
                continue
            try:
                parent.mkdir(parents=parent == self.path)
            except FileExistsError:
                continue
            if self.file_mode is not None:
                parent.chmod(FOLDER_MODE)

    def _stated(self) -> SignedNewest | None:
        try:
            return Listing.model_validate_json((self.path / "versions.json").read_bytes()).newest
        except (FileNotFoundError, ValueError):
            return None  # the caller then rebuilds versions.json

    def _on_disk(self) -> list[int]:
        names = (folder.parent.name for folder in self.path.glob("v*/manifest.json"))
        return sorted((v for name in names if (v := parse_version(name)) is not None), reverse=True)

    def _list(self, versions: list[int]) -> None:
        path = () if self._via is None else (*self._via, self.id)
        file = self.path / "versions.json"
        listing = Listing(versions=tuple(versions[:MAX_VERSIONS]), path=path, newest=self.newest)
        text = listing.model_dump_json(exclude_none=True).encode()
        if not file.exists() or file.read_bytes() != text:
            write_file(file, text, mode=self.file_mode)


def chain(held: Mapping[int, Manifest], version: int) -> list[int]:
    """Return the versions needed to build `version` from scratch: itself and its parents, back to an anchor."""
    needed = [version]
    while (manifest := held.get(needed[-1])) and not manifest.anchor and manifest.delta:
        needed.append(manifest.delta.parent)
    return needed
