"""The folder of published versions that an origin or relay holds: plain files that nginx could serve.

    versions.json              {"versions": [newest, ..., oldest]}
    v000007/manifest.json      the signed manifest
    v000007/00000.shard        the shards

Invariant: a file under its final name is whole and never changes; it is written under a temporary name,
fsynced, then renamed. versions.json lists exactly the version folders that hold a manifest, so it can be
rebuilt after any crash.
Called by the origin and relay (its single writer) and the server (reader).
Left out: object storage, and several writers of one store.
Paper: INTELLECT-2, SHARDCAST (relays keep the last five versions).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field

from .manifest import MAX_VERSION, Manifest, ShardEntry, SignedManifest

CHUNK_BYTES = 1 << 20
VERSION_PATTERN = r"v\d{6,9}"
SHARD_PATTERN = r"\d{5}\.shard"


class Listing(BaseModel):
    """versions.json. Over HTTP a mere claim: a listed version exists once its manifest is opened."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    versions: tuple[Annotated[int, Field(ge=0, le=MAX_VERSION)], ...] = Field(max_length=10_000)


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


def shard_name(index: int) -> str:
    return f"{index:05d}.shard"


class Store:
    def __init__(self, path: Path) -> None:
        self.path = path

    def folder(self, version: int) -> Path:
        return self.path / version_name(version)

    def manifest_path(self, version: int) -> Path:
        return self.folder(version) / "manifest.json"

    def shard_path(self, version: int, index: int) -> Path:
        return self.folder(version) / shard_name(index)

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

    def damaged(self, manifest: Manifest) -> list[ShardEntry]:
        """The shards that are absent or whose bytes do not match; reads every byte that is there."""
        return [shard for shard in manifest.shards if not self._matches(manifest.version, shard)]

    def add_manifest(self, version: int, signed: SignedManifest) -> None:
        """Makes the version known, here and in versions.json."""
        self.folder(version).mkdir(parents=True, exist_ok=True)
        write_file(self.manifest_path(version), signed.to_bytes())
        self._list(self._on_disk())

    def retain(self, keep: int) -> None:
        """Drops all but the newest `keep` versions; readers in the middle of a file keep what they opened."""
        versions = self._on_disk()
        self._list(versions[:keep])
        for version in versions[keep:]:
            discard(self.folder(version))

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
                remove_leftovers(folder)
                if not (folder / "manifest.json").is_file():
                    discard(folder)
        self._list(self._on_disk())

    def _matches(self, version: int, shard: ShardEntry) -> bool:
        try:
            with self.shard_path(version, shard.index).open("rb") as file:
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
        path = self.path / "versions.json"
        text = Listing(versions=tuple(versions)).model_dump_json().encode()
        if not path.exists() or path.read_bytes() != text:
            write_file(path, text)


class NewFile:
    """A file that has no name yet: it gets one by `commit`, or is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.tmp")
        self._fd = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def write(self, offset_bytes: int, data: bytes | memoryview) -> None:
        write_all(self._fd, data, offset_bytes)

    def commit(self) -> None:
        os.fsync(self._fd)
        self.temporary.rename(self.path)
        fsync(self.path.parent)

    def close(self) -> None:
        os.close(self._fd)
        self.temporary.unlink(missing_ok=True)


@contextmanager
def new_file(path: Path) -> Iterator[NewFile]:
    file = NewFile(path)
    try:
        yield file
    finally:
        file.close()


def write_file(path: Path, data: bytes) -> None:
    with new_file(path) as file:
        file.write(0, data)
        file.commit()


def write_all(fd: int, data: bytes | memoryview, offset_bytes: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset_bytes)
        view, offset_bytes = view[written:], offset_bytes + written


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def discard(folder: Path) -> None:
    """Removes a folder such that a half-removed one is never taken for a version."""
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    try:
        folder.rename(gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """What a killed process left: temporary files and half-removed folders."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)
    for path in folder.glob(".*.gone"):
        shutil.rmtree(path, ignore_errors=True)
