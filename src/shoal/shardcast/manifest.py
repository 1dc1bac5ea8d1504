"""What one policy version consists of: its files, shards and hashes, and the signature over all that.

Invariant: a `Manifest` object is always well-formed (sizes add up, paths stay inside the folder, bounds
hold), and one that came from `SignedManifest.open` was also signed by the expected key. `Manifest.digest`
names the policy version everywhere else in Shoal; it is taken over canonical JSON, so that one manifest has
exactly one digest.
Called by the origin (sign) and by relays and clients (open).
Left out: key rotation, and more than one signer.
Paper: INTELLECT-2 (arXiv 2505.07291), SHARDCAST: checkpoints are sharded, and clients check what they
assembled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_SIZE_BYTES = 1 << 40  # 1 TiB
MAX_SHARDS = 100_000
MAX_FILES = 10_000
MAX_PATH_CHARS = 512
MAX_VERSION = 10**9 - 1

# Two kinds of text signed by one key must never be taken for one another.
SIGNATURE_DOMAIN = b"shoal shardcast manifest 1\n"

# A word list of safe characters, not a list of bad ones: every file system takes these names literally.
_PATH_PART = re.compile(r"[A-Za-z0-9_.+=@,()-][A-Za-z0-9 _.+=@,()-]*")

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ManifestError(ValueError):
    """This manifest cannot be used, and why."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class FileEntry(_Record):
    path: str
    size_bytes: int = Field(ge=0, le=MAX_SIZE_BYTES)


class ShardEntry(_Record):
    index: int = Field(ge=0, lt=MAX_SHARDS)
    size_bytes: int = Field(ge=1, le=MAX_SIZE_BYTES)
    hash: Hash


class Manifest(_Record):
    """One policy version: its files, concatenated in listed order, are one byte string cut into shards."""

    format: Literal[1] = 1
    run: str = Field(pattern=r"^[\x20-\x7e]{1,200}$")
    version: int = Field(ge=0, le=MAX_VERSION)
    files: tuple[FileEntry, ...] = Field(min_length=1, max_length=MAX_FILES)
    shard_size_bytes: int = Field(ge=1, le=MAX_SIZE_BYTES)
    shards: tuple[ShardEntry, ...] = Field(max_length=MAX_SHARDS)
    size_bytes: int = Field(ge=0, le=MAX_SIZE_BYTES)
    hash: Hash  # blake3 of the concatenated files
    created_s: float = Field(ge=0)  # seconds since 1970

    @model_validator(mode="after")
    def _adds_up(self) -> Manifest:
        check_paths([file.path for file in self.files])
        if sum(file.size_bytes for file in self.files) != self.size_bytes:
            raise ValueError("file sizes do not add up to size_bytes")
        if [shard.index for shard in self.shards] != list(range(len(self.shards))):
            raise ValueError("shards are not numbered 0, 1, 2, ...")
        whole, rest = divmod(self.size_bytes, self.shard_size_bytes)
        expected = [self.shard_size_bytes] * min(whole, MAX_SHARDS) + [rest] * (rest > 0)
        if [shard.size_bytes for shard in self.shards] != expected:
            raise ValueError("shard sizes do not add up to size_bytes")
        return self

    def canonical(self) -> bytes:
        """The one JSON text of this manifest: sorted keys, no spaces, ASCII."""
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        """blake3 of the canonical text, hex: the name of the policy version."""
        return blake3(self.canonical()).hexdigest()


class SignedManifest(_Record):
    """A manifest as it travels. Untrusted until opened."""

    manifest: str  # canonical JSON text
    key: Hash  # ed25519 public key, hex
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")

    @classmethod
    def sign(cls, manifest: Manifest, private_key: Ed25519PrivateKey) -> SignedManifest:
        text = manifest.canonical()
        return cls(
            manifest=text.decode(),
            key=public_key_hex(private_key),
            signature=private_key.sign(SIGNATURE_DOMAIN + text).hex(),
        )

    @classmethod
    def parse(cls, body: bytes) -> SignedManifest:
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise ManifestError(f"malformed signed manifest: {_first(error)}") from error

    def open(self, public_key: str, *, run: str | None = None, version: int | None = None) -> Manifest:
        """The checked manifest. `run` and `version`, where given, are what the caller asked for: a true
        manifest of something else is refused too. Raises ManifestError."""
        if self.key != public_key:
            raise ManifestError(f"wrong signer: signed by {self.key}, expected {public_key}")
        text = self.manifest.encode()
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(
                bytes.fromhex(self.signature), SIGNATURE_DOMAIN + text
            )
        except InvalidSignature as error:
            raise ManifestError(f"bad signature: the text is not what {public_key} signed") from error
        try:
            manifest = Manifest.model_validate_json(text)
        except ValidationError as error:
            raise ManifestError(f"malformed manifest: {_first(error)}") from error
        if manifest.canonical() != text:
            raise ManifestError("malformed manifest: the JSON text is not canonical")
        if run is not None and manifest.run != run:
            raise ManifestError(f"manifest of run {manifest.run!r}, expected {run!r}")
        if version is not None and manifest.version != version:
            raise ManifestError(f"manifest of version {manifest.version}, expected {version}")
        return manifest

    def to_bytes(self) -> bytes:
        return self.model_dump_json().encode()


def public_key_hex(private_key: Ed25519PrivateKey) -> str:
    return private_key.public_key().public_bytes_raw().hex()


def check_paths(paths: Sequence[str]) -> None:
    """Raises ManifestError unless every path is relative, plain, inside the folder, and distinct."""
    seen: set[str] = set()
    folders: set[str] = set()
    for path in paths:
        parts = path.split("/")
        if len(path) > MAX_PATH_CHARS or not all(
            _PATH_PART.fullmatch(part) and part not in (".", "..") for part in parts
        ):
            raise ManifestError(f"file path {path[:MAX_PATH_CHARS]!r} is absolute, climbs out or is not a plain name")
        if path.lower() in seen:  # also on file systems that ignore case
            raise ManifestError(f"file path {path!r} appears twice")
        seen.add(path.lower())
        folders.update("/".join(parts[:depth]).lower() for depth in range(1, len(parts)))
    if both := seen & folders:
        raise ManifestError(f"path {min(both)!r} is both a file and a folder")


def _first(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else problem["msg"]
