"""Names of versions and shards, in a store and in URLs, and the list of versions that every server publishes.

Called by publishers, servers and downloaders alike.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from shoal.shardcast.format.manifest import MAX_VERSION, Part
from shoal.shardcast.format.newest import SignedNewest

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
