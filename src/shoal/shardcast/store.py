"""The folder of published versions that an origin or relay holds: plain files that nginx could serve.

    versions.json                {"versions": [newest, ..., oldest], "path": [origin's id, ..., own id]}
    v000007/manifest.json        the signed manifest
    v000007/full/00000.shard     the shards of its content, where it is an anchor
    v000007/delta/00000.shard    those of its delta, where it has one

Invariant: a shard under its final name is whole and never changes; it is written under a temporary name (which the
server reads too, to pass on what is still arriving), then renamed. A manifest is replaced only by one that
extends it. versions.json lists exactly the version folders that hold a manifest, so it can be rebuilt after any crash.
Called by the origin and relay (its single writer) and the server (reader), which share one `Store` in one process.
Left out: object storage, and several writers of one store.
Paper: INTELLECT-2, SHARDCAST (relays keep the last five versions).
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Annotated

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field

from shoal.files import CHUNK_BYTES, discard, remove_leftovers, write_file
from shoal.shardcast.format.manifest import MAX_VERSION, Manifest, Part, ShardEntry, SignedManifest

MAX_HOPS = 64  # from the origin, itself included
VERSION_PATTERN = r"v\d{6,9}"
SHARD_PATTERN = r"\d{5}\.shard"


class Listing(BaseModel):
    """versions.json. Over HTTP a mere claim: a listed version exists once its manifest is opened."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    versions: tuple[Annotated[int, Field(ge=0, le=MAX_VERSION)], ...] = Field(max_length=10_000)
    path: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")], ...] = Field(default=(), max_length=MAX_HOPS)


def version_name(version: int) -> str:
    if not 0 <= version <= MAX_VERSION:
        raise ValueError(f"version {version} is not in 0..{MAX_VERSION}")
    return f"v{version:06d}"


def parse_version(name: str) -> int | None:
    """The version a folder name stands for, None for any other name (v0000007 is no second name of 7)."""
    if not re.fullmatch(VERSION_PATTERN, name, re.ASCII):
        return None
    version = int(name[1:])
    return version if version_name(version) == name else None


def shard_name(part: Part, index: int) -> str:
    return f"{part}/{index:05d}.shard"


class StoreFullError(OSError):
    """A version does not fit the quota."""


class Store:
    def __init__(self, path: Path, *, keep: int = 5, quota_bytes: int | None = None, lease_s: float = 60.0) -> None:
        """`keep` newest versions are held, with what they are deltas of; fewer where they exceed `quota_bytes`, also
        while one is being written. A version that a reader asked for within `lease_s` stays."""
        self.path = path
        self.keep, self.quota_bytes, self.lease_s = keep, quota_bytes, lease_s
        self._asked_s: dict[int, float] = {}
        self._via: tuple[str, ...] | None = None

    @cached_property
    def id(self) -> str:
        """Names this store for good, so that relays can tell who is behind whom."""
        path = self.path / "id"
        if not path.is_file():
            self.path.mkdir(parents=True, exist_ok=True)
            write_file(path, secrets.token_hex(8).encode())
        return path.read_text()

    def reached_via(self, path: Sequence[str]) -> None:
        """What lies between the origin and this store, the origin first. Until it is known versions.json has no path."""
        if tuple(path) != self._via:
            self._via = tuple(path)
            self._list(self.versions())

    def folder(self, version: int) -> Path:
        return self.path / version_name(version)

    def manifest_path(self, version: int) -> Path:
        return self.folder(version) / "manifest.json"

    def shard_path(self, version: int, part: Part, index: int) -> Path:
        return self.folder(version) / shard_name(part, index)

    def lease(self, version: int) -> None:
        """A reader asked for something of this version."""
        self._asked_s[version] = time.monotonic()

    def versions(self) -> list[int]:
        """The listed versions, newest first."""
        try:
            return list(Listing.model_validate_json((self.path / "versions.json").read_bytes()).versions)
        except FileNotFoundError:
            return []

    def signed(self, version: int) -> SignedManifest | None:
        """The manifest held, None if there is none. Raises ManifestError when it is damaged."""
        try:
            return SignedManifest.parse(self.manifest_path(version).read_bytes())
        except FileNotFoundError:
            return None

    def missing(self, manifest: Manifest) -> list[tuple[Part, ShardEntry]]:
        """The shards that are absent or whose bytes do not match; reads every byte that is there. Deltas first."""
        return [
            (part, shard)
            for part, stream in sorted(manifest.streams.items())
            for shard in stream.entries()
            if not self._matches(manifest.version, part, shard)
        ]

    def add_manifest(self, version: int, signed: SignedManifest) -> None:
        """Makes the version known, here and in versions.json."""
        self.folder(version).mkdir(parents=True, exist_ok=True)
        write_file(self.manifest_path(version), signed.to_bytes())
        self._list(self._on_disk())

    def retain(self, held: Mapping[int, Manifest]) -> None:
        """Drops what `keep` and the quota do not allow, but for versions under lease and those that kept ones are
        deltas of. `held` are the manifests of all versions here. Readers in the middle of a file keep what they opened.
        """
        wanted = self.wanted(held)
        self._list([version for version in sorted(held, reverse=True) if version in wanted])
        for version in self._on_disk():
            if version not in wanted:
                discard(self.folder(version))
                self._asked_s.pop(version, None)

    def wanted(self, held: Mapping[int, Manifest], *, keep: int | None = None) -> set[int]:
        """What `retain` would keep of these versions, or would if `keep` were another."""
        keep = self.keep if keep is None else keep
        wanted: set[int] = set()
        now_s = time.monotonic()
        for place, version in enumerate(sorted(held, reverse=True)):
            family = set(chain(held, version))
            fits = self.quota_bytes is None or stored_bytes(held, wanted | family) <= self.quota_bytes
            leased = now_s - self._asked_s.get(version, -inf) < self.lease_s
            if place == 0 or ((place < keep or leased) and fits):
                wanted |= family
        return wanted

    def make_room(self, held: Mapping[int, Manifest], version: int, needs: Iterable[int], more_bytes: int) -> None:
        """Drops versions, the oldest first, until `more_bytes` of a new one fit the quota beside the others. Those it
        `needs` stay. Raises StoreFullError where that is not enough; then nothing is dropped."""
        if self.quota_bytes is None:
            return
        left = set(held) - {version}
        droppable = sorted(left - set(needs))
        while (needed_bytes := stored_bytes(held, left) + more_bytes) > self.quota_bytes and droppable:
            left.discard(droppable.pop(0))
            droppable = [
                known for known in droppable if left.issuperset(set(chain(held, known)) & set(held) - {version})
            ]
            left = left & {*droppable, *needs}  # half a chain is of no use
        if needed_bytes > self.quota_bytes:
            raise StoreFullError(
                f"version {version} needs {needed_bytes} bytes in {self.path}, the quota is {self.quota_bytes}; raise it"
            )
        for dropped in set(held) - {version} - left:
            self.discard(dropped)
            self._asked_s.pop(dropped, None)

    def discard(self, version: int) -> None:
        """Forgets one version, whole or half."""
        self._list([held for held in self._on_disk() if held != version])
        discard(self.folder(version))

    def recover(self) -> None:
        """Puts a store that a killed writer left behind in order. Only its writer may call this."""
        self.path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path)
        for folder in self.path.iterdir():
            if parse_version(folder.name) is not None:
                remove_leftovers(folder)  # but half a shard in full/ or delta/ is taken up again
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

    def _on_disk(self) -> list[int]:
        names = (folder.parent.name for folder in self.path.glob("v*/manifest.json"))
        return sorted((v for name in names if (v := parse_version(name)) is not None), reverse=True)

    def _list(self, versions: list[int]) -> None:
        path = () if self._via is None else (*self._via, self.id)
        file = self.path / "versions.json"
        text = Listing(versions=tuple(versions), path=path).model_dump_json().encode()
        if not file.exists() or file.read_bytes() != text:
            write_file(file, text)


def chain(held: Mapping[int, Manifest], version: int) -> list[int]:
    """The versions needed to make `version` from nothing: itself, and what it is a delta of, back to an anchor."""
    needed = [version]
    while (manifest := held.get(needed[-1])) and not manifest.anchor and manifest.delta:
        needed.append(manifest.delta.parent)
    return needed


def stored_bytes(held: Mapping[int, Manifest], versions: Iterable[int]) -> int:
    return sum(stream.size_bytes for v in versions if v in held for stream in held[v].streams.values())
