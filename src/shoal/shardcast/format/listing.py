"""What a server says it has: the list of versions, their names, and the origin's signed statement of its newest version.

A publication is what an origin publishes from one store. Its random id stands in each manifest and statement. An origin
that starts over with an empty store begins another publication, and readers leave the one before.
Invariant: the statements of one publication have increasing serials, also after a restart and whatever the clock does. Of
two, the one with the higher serial is right. Between publications `latest` decides, by the reader's clock.
Left out: proof that a reader was shown the latest statement; `shoal fetch --max-age` refuses old ones.
Source: the timestamp role of The Update Framework.
"""

from __future__ import annotations

import re
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.shardcast.format.manifest import MAX_VERSION, Manifest, Part, Publication

# Domain separation: nothing else that this key signs can be taken for a statement.
SIGNATURE_DOMAIN = b"shoal shardcast newest 2\n"
CURRENT_S = 3600.0  # a statement this far from the reader's clock, or less, may come from an origin that is running


MAX_SERIAL = 10**18


class Newest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    run: str = Field(max_length=200)
    publication: Publication
    version: int = Field(ge=0, le=MAX_VERSION)
    serial: int = Field(ge=0, le=MAX_SERIAL)  # order within the publication
    as_of_s: float = Field(ge=0)  # when the origin stated this; seconds since 1970

    @classmethod
    def of(cls, manifest: Manifest) -> Newest:
        """What a verified manifest states by itself: that it was the newest version when it was created."""
        return cls(
            run=manifest.run,
            publication=manifest.publication,
            version=manifest.version,
            serial=0,
            as_of_s=manifest.created_s,
        )

    def outdates(self, manifest: Manifest) -> bool:
        """Whether the manifest is of another publication: of before the origin started over."""
        return manifest.publication != self.publication


class SignedNewest(BaseModel):
    """A statement as it is sent. Untrusted until `open` has verified it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    statement: str = Field(max_length=1000)  # JSON text
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")

    @classmethod
    def sign(cls, newest: Newest, private_key: Ed25519PrivateKey) -> SignedNewest:
        text = newest.model_dump_json()
        return cls(statement=text, signature=private_key.sign(SIGNATURE_DOMAIN + text.encode()).hex())

    def open(self, public_key: str, *, run: str | None = None) -> Newest | None:
        """The statement; None unless this key signed it, for this run if one is given."""
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(
                bytes.fromhex(self.signature), SIGNATURE_DOMAIN + self.statement.encode()
            )
            newest = Newest.model_validate_json(self.statement)
        except (InvalidSignature, ValidationError):
            return None
        return newest if run in (None, newest.run) else None


def latest(first: Newest | None, second: Newest | None, now_s: float) -> Newest | None:
    """The one to believe. Between publications: one that is current by the reader's clock, else the one stated later. So
    statements of an origin whose clock was ahead do not count after that clock was corrected."""
    if first is None or second is None:
        return first or second
    if first.publication == second.publication:
        return max(first, second, key=lambda newest: (newest.serial, newest.as_of_s))
    return max(first, second, key=lambda newest: (abs(now_s - newest.as_of_s) <= CURRENT_S, newest.as_of_s))


MAX_VERSIONS = 10_000  # listed by one server
MAX_HOPS = 64  # servers on a path, origin included
MAX_LISTING_BYTES = 256 << 10  # of versions.json: twice what the largest Listing has
VERSION_PATTERN = r"v\d{6,9}"


class Listing(BaseModel):
    """versions.json. A listing fetched over HTTP is only a claim: a version exists once its manifest is verified."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    versions: tuple[Annotated[int, Field(ge=0, le=MAX_VERSION)], ...] = Field(max_length=MAX_VERSIONS)
    path: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")], ...] = Field(default=(), max_length=MAX_HOPS)
    newest: SignedNewest | None = None  # the latest that this server has heard from the origin


def version_name(version: int) -> str:
    if not 0 <= version <= MAX_VERSION:
        raise ValueError(f"version {version} is not in 0..{MAX_VERSION}")
    return f"v{version:06d}"


def parse_version(name: str) -> int | None:
    """The version that a folder name stands for, or None. Each version has one name: v0000007 is not version 7."""
    if not re.fullmatch(VERSION_PATTERN, name, re.ASCII):
        return None
    version = int(name[1:])
    return version if version_name(version) == name else None


def shard_name(part: Part, index: int) -> str:
    return f"{part}/{index:05d}.shard"
