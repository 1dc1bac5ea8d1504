"""The signed manifest of each version, the signed statement of the newest version, and the list of versions.

A manifest names a version's files, shards and hashes. A publication is everything that an origin publishes from one store.
Each manifest and statement holds the publication's random id. An origin that starts over with an empty store starts
another publication, and readers switch to it.

Invariant: a `Manifest` object is always well-formed: sizes add up, paths stay inside the folder, and numbers are within
their bounds. `SignedManifest.open` returns only manifests signed by the expected key.
`Manifest.digest` names the version everywhere in Shoal. It is the hash of the canonical JSON without the transfer
options (anchor, delta), the publication and the date. So the same files, published again as the same version, have the
same digest.
Within a publication the serials of statements increase, even across restarts and clock changes. The statement with the
highest serial is valid. Between publications `latest` decides by the reader's clock.
Left out: key rotation, several signers, and proof of freshness. Mirrors that withhold the latest statement can keep a
reader behind. (In a pool the coordinator names each version.)
Paper: INTELLECT-2 (arXiv 2505.07291), SHARDCAST: checkpoints are sharded, and clients verify what they assembled.
Source: the timestamp role of The Update Framework.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shoal.errors import ShoalError, first_problem
from shoal.identity import IdentityError
from shoal.identity import public_key as safe_key

FORMAT: Literal[5] = 5
MAX_SIZE_BYTES = 1 << 40  # 1 TiB
MAX_SHARDS = 100_000
MAX_FILES = 10_000
MAX_PATH_CHARS = 512
MAX_VERSION = 10**9 - 1
MAX_MANIFEST_BYTES = 16 << 20  # a signed manifest with MAX_SHARDS shards of content and as many of a delta has 14 MiB

# Domain separation: nothing else that this key signs is a valid manifest.
SIGNATURE_DOMAIN = b"shoal shardcast manifest 5\n"

# How the output of `SignedManifest.to_bytes` ends and begins.
_ENDING = re.compile(rb',"key":"([0-9a-f]{64})","signature":"([0-9a-f]{128})"}')
_BEGINNING, _ENDING_BYTES = b'{"manifest":', 217

# An allowlist: these names are safe on every file system.
_NAME = re.compile(r"[A-Za-z0-9_.+=@,()-][A-Za-z0-9 _.+=@,()-]{0,254}")
_FORMAT = re.compile(r'"format":(\d{1,9})')

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Publication = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # a random id
Part = Literal["full", "delta"]


class ManifestError(ShoalError, ValueError):
    """A manifest is invalid."""


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class FileEntry(Record):
    path: str
    size_bytes: int = Field(ge=0, le=MAX_SIZE_BYTES)


@dataclass(frozen=True)
class ShardEntry:
    index: int
    size_bytes: int
    hash: str


class Stream(Record):
    """A byte string cut into shards of equal size; the last one may be shorter."""

    size_bytes: int = Field(ge=0, le=MAX_SIZE_BYTES)
    shard_size_bytes: int = Field(ge=1, le=MAX_SIZE_BYTES)
    shards: tuple[Hash, ...] = Field(max_length=MAX_SHARDS)

    @model_validator(mode="after")
    def _adds_up(self) -> Stream:
        needed = -(-self.size_bytes // self.shard_size_bytes)
        if len(self.shards) != needed:
            raise ValueError(f"{len(self.shards)} shards, but {self.size_bytes} bytes need {needed}")
        return self

    def entries(self) -> list[ShardEntry]:
        size, whole = self.shard_size_bytes, self.size_bytes
        return [ShardEntry(i, min(size, whole - i * size), hash) for i, hash in enumerate(self.shards)]


class Delta(Record):
    """The delta from the parent version's files to this version's: see `delta.py`."""

    parent: int = Field(ge=0, le=MAX_VERSION)
    parent_digest: Hash
    stream: Stream


class Manifest(Record):
    """One version. `content` is its files, concatenated in listed order. Only the content of an anchor can be fetched;
    for any other version, only its delta."""

    format: Literal[5] = FORMAT
    run: str = Field(pattern=r"^[\x20-\x7e]{1,200}$")
    publication: Publication
    version: int = Field(ge=0, le=MAX_VERSION)
    files: tuple[FileEntry, ...] = Field(min_length=1, max_length=MAX_FILES)
    content: Stream
    anchor: bool
    delta: Delta | None
    created_s: float = Field(ge=0, le=1e12)  # seconds since 1970

    @model_validator(mode="after")
    def _adds_up(self) -> Manifest:
        check_paths([file.path for file in self.files])
        if sum(file.size_bytes for file in self.files) != self.content.size_bytes:
            raise ValueError("file sizes do not add up to the content's size_bytes")
        if self.delta is not None and self.delta.parent >= self.version:
            raise ValueError("a delta must have an earlier parent")
        if not (self.anchor or self.delta):
            raise ValueError("a version that is not an anchor must have a delta")
        return self

    @property
    def size_bytes(self) -> int:
        return self.content.size_bytes

    @property
    def streams(self) -> dict[Part, Stream]:
        """The streams that can be fetched."""
        streams: dict[Part, Stream] = {"full": self.content} if self.anchor else {}
        return streams | ({"delta": self.delta.stream} if self.delta else {})

    def canonical(self) -> bytes:
        """Return the canonical JSON text of this manifest: sorted keys, no spaces, ASCII."""
        return _canonical(self.model_dump())

    @cached_property
    def digest(self) -> str:
        """The version's name: a BLAKE3 hash (hex) of its contents. How they can be fetched does not change the hash."""
        excluded = {"anchor", "delta", "publication", "created_s"}
        return blake3(_canonical(self.model_dump(exclude=excluded))).hexdigest()

    def supersedes(self, other: Manifest) -> bool:
        """Return whether this manifest belongs to another publication than `other`, or is later in the same one."""
        return self.publication != other.publication or self.created_s > other.created_s


class SignedManifest(Record):
    """A manifest as it is transferred. It is untrusted until `open` has verified it."""

    manifest: str  # canonical JSON text
    key: Hash  # ed25519 public key, hex
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")

    @classmethod
    def sign(cls, manifest: Manifest, private_key: Ed25519PrivateKey) -> SignedManifest:
        text = manifest.canonical()
        signed = cls(
            manifest=text.decode(),
            key=public_key_hex(private_key),
            signature=private_key.sign(SIGNATURE_DOMAIN + text).hex(),
        )
        if (size_bytes := len(signed.to_bytes())) > MAX_MANIFEST_BYTES:
            raise ManifestError(
                f"the manifest of version {manifest.version} has {size_bytes} bytes, and readers accept at most "
                f"{MAX_MANIFEST_BYTES}; publish fewer files, or choose larger shards"
            )
        return signed

    @classmethod
    def parse(cls, body: bytes) -> SignedManifest:
        """Parse the output of `to_bytes`. Do not run a JSON parser on the whole untrusted body, because it could use far
        more memory than the body's size. Raise ManifestError."""
        ending = _ENDING.fullmatch(body, max(len(body) - _ENDING_BYTES, 0))
        if ending is None or not body.startswith(_BEGINNING + b'"'):
            raise ManifestError("malformed signed manifest: not a text with a key and a signature")
        try:
            # The result is a string, because this JSON text starts with a quote.
            text = json.loads(body[len(_BEGINNING) : ending.start()].decode("ascii"))
            text.encode("ascii")  # raises ValueError if an escape decoded to a character outside ASCII
            return cls(manifest=text, key=ending[1].decode(), signature=ending[2].decode())
        except ValueError as error:
            why = str(error)[:100]
        raise ManifestError(
            f"malformed signed manifest: {why}"
        )  # not chained: the original error contains the whole text

    def open(self, public_key: str, *, run: str | None = None, version: int | None = None) -> Manifest:
        """Verify the signature, and compare `run` and `version` if given. Return the manifest. Raise ManifestError."""
        if self.key != public_key:
            raise ManifestError(f"wrong signer: signed by {self.key}, expected {public_key}")
        text = self.manifest.encode()
        try:
            safe_key(public_key).verify(bytes.fromhex(self.signature), SIGNATURE_DOMAIN + text)
        except (InvalidSignature, IdentityError) as error:
            stated = _FORMAT.search(self.manifest)
            if stated and stated[1] != str(FORMAT):
                raise ManifestError(
                    f"the manifest has format {stated[1]}; this version of Shoal reads format {FORMAT}"
                ) from error
            raise ManifestError(f"bad signature: {public_key} did not sign this manifest") from error
        manifest = self.unchecked()
        if manifest.canonical() != text:
            raise ManifestError("malformed manifest: the JSON text is not canonical")
        if run is not None and manifest.run != run:
            raise ManifestError(f"manifest of run {manifest.run!r}, expected {run!r}")
        if version is not None and manifest.version != version:
            raise ManifestError(f"manifest of version {manifest.version}, expected {version}")
        return manifest

    def unchecked(self) -> Manifest:
        """Return the manifest, well-formed but not verified. Raise ManifestError."""
        try:
            return Manifest.model_validate_json(self.manifest)
        except ValidationError as error:
            raise ManifestError(f"malformed manifest: {first_problem(error)}") from error

    def to_bytes(self) -> bytes:
        return self.model_dump_json().encode()


def public_key_hex(private_key: Ed25519PrivateKey) -> str:
    return private_key.public_key().public_bytes_raw().hex()


def _canonical(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def check_paths(paths: Sequence[str]) -> None:
    """Raise ManifestError unless every path is relative, plain, inside the folder, and distinct."""
    if len(paths) > MAX_FILES:
        raise ManifestError(f"{len(paths)} files, and a version has at most {MAX_FILES}; pack them into fewer")
    seen: dict[str, str] = {}
    folders: set[str] = set()
    for path in paths:
        parts = path.split("/")
        if len(path) > MAX_PATH_CHARS or not all(map(_is_plain, parts)):
            raise ManifestError(
                f"file path {path[:MAX_PATH_CHARS]!r} is not a plain relative path: at most {MAX_PATH_CHARS} characters and "
                "255 for each name, of A to Z, a to z, digits, spaces and _ . + = @ , ( ) -; rename it"
            )
        names = [_folded(part) for part in parts]
        if other := seen.get("/".join(names)):
            again = (
                "appears twice" if other == path else f"and {other!r} are one file where case is ignored; rename one"
            )
            raise ManifestError(f"file path {path!r} {again}")
        seen["/".join(names)] = path
        folders.update("/".join(names[:depth]) for depth in range(1, len(names)))
    if both := seen.keys() & folders:
        raise ManifestError(f"path {seen[min(both)]!r} is both a file and a folder")


def _is_plain(name: str) -> bool:
    return name not in (".", "..") and _NAME.fullmatch(name) is not None


def _folded(name: str) -> str:
    """Normalise a name as some file systems do: ignore case, and trailing spaces and dots."""
    return name.lower().rstrip(" .") or name


# Domain separation: nothing else that this key signs is a valid statement.
STATEMENT_DOMAIN = b"shoal shardcast newest 2\n"
CURRENT_S = 3600.0  # a statement is current if its date is within this time of the reader's clock


MAX_SERIAL = 10**18


class Newest(Record):
    """The origin's statement of which version is the newest."""

    run: str = Field(pattern=r"^[\x20-\x7e]{1,200}$")
    publication: Publication
    version: int = Field(ge=0, le=MAX_VERSION)
    serial: int = Field(ge=0, le=MAX_SERIAL)  # a later statement of the publication has a higher serial
    as_of_s: float = Field(ge=0, le=1e12)  # when it was signed, in seconds since 1970

    @classmethod
    def of(cls, manifest: Manifest) -> Newest:
        """Return the statement that a verified manifest implies: it was the newest version when it was created."""
        return cls(
            run=manifest.run,
            publication=manifest.publication,
            version=manifest.version,
            serial=0,
            as_of_s=manifest.created_s,
        )

    def outdates(self, manifest: Manifest) -> bool:
        """Return whether the manifest belongs to another publication, from before the origin started over."""
        return manifest.publication != self.publication


class SignedNewest(Record):
    """A statement as it is transferred. It is untrusted until `open` has verified it."""

    statement: str = Field(max_length=1000)  # JSON text
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")

    @classmethod
    def sign(cls, newest: Newest, private_key: Ed25519PrivateKey) -> SignedNewest:
        text = newest.model_dump_json()
        return cls(statement=text, signature=private_key.sign(STATEMENT_DOMAIN + text.encode()).hex())

    def open(self, public_key: str, *, run: str | None = None) -> Newest | None:
        """Return the statement. Return None if this key did not sign it, or if it is not for the given `run`."""
        try:
            safe_key(public_key).verify(bytes.fromhex(self.signature), STATEMENT_DOMAIN + self.statement.encode())
            newest = Newest.model_validate_json(self.statement)
        except (InvalidSignature, IdentityError, ValidationError):
            return None
        if newest.model_dump_json() != self.statement:  # only one text of a statement is valid
            return None
        return newest if run in (None, newest.run) else None


def latest(first: Newest | None, second: Newest | None, now_s: float) -> Newest | None:
    """Return the valid one of two statements. Between publications prefer a statement that is current by the reader's
    clock, then the later one. So if an origin's clock was ahead, its statements lose once the clock is corrected."""
    if first is None or second is None:
        return first or second
    if first.publication == second.publication:
        return max(first, second, key=lambda newest: (newest.serial, newest.as_of_s))
    return max(first, second, key=lambda newest: (abs(now_s - newest.as_of_s) <= CURRENT_S, newest.as_of_s))


MAX_VERSIONS = 10_000  # limit on the versions that one server may list
MAX_HOPS = 64  # limit on the servers on a path, including the origin
MAX_LISTING_BYTES = 256 << 10  # limit of versions.json, twice the size of the largest Listing
VERSION_PATTERN = r"v\d{6,9}"


class Listing(Record):
    """The contents of versions.json. If fetched, they are only a claim until the versions' manifests are verified."""

    versions: tuple[Annotated[int, Field(ge=0, le=MAX_VERSION)], ...] = Field(max_length=MAX_VERSIONS)
    path: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")], ...] = Field(default=(), max_length=MAX_HOPS)
    newest: SignedNewest | None = None  # the origin's latest statement that this server has


def version_name(version: int) -> str:
    if not 0 <= version <= MAX_VERSION:
        raise ValueError(f"version {version} is not in 0..{MAX_VERSION}")
    return f"v{version:06d}"


def parse_version(name: str) -> int | None:
    """Return the version that a folder's name states, or None. "v0000007" gives None: version 7 is only "v000007"."""
    if not re.fullmatch(VERSION_PATTERN, name, re.ASCII):
        return None
    version = int(name[1:])
    return version if version_name(version) == name else None


def shard_name(part: Part, index: int) -> str:
    return f"{part}/{index:05d}.shard"
