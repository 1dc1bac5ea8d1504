"""Files that nodes send to the pool's bucket and fetch from it themselves, by signed URLs.

    announce (size, SHA-256) -> grant -> the node's PUT to the bucket -> stored: checked, named, recorded

Invariant: only a node with the grant's right at that moment gets a URL, and only then is a file named and recorded. For
one task it may announce MOST_FILES different files, so what a worker can leave in the bucket is bounded. No credential
leaves this process. Called by `files`, where `store.url` is set; else `files` itself takes and gives the bytes.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shoal.config import Config
from shoal.coordinator.state.database import PoolError
from shoal.protocol.messages import Announced, Grant, Link, Role, Stored
from shoal.store.folder import StoreError

if TYPE_CHECKING:
    from shoal.store.bucket import Bucket

MOST_FILES = 4  # a restarted worker may make its file again


@dataclass(frozen=True)
class FileKind:
    """One kind of rollout files: who sends and fetches them, and what the pool says of each."""

    name: Literal["submissions", "accepted"]
    sender: Role
    reader: Role
    may_store: Callable[
        [str, str, str], None
    ]  # key, submission, the file's hash or "" before it is known; raises PoolError
    stored: Callable[[str, str, str], None]  # likewise, and records it
    hash_of: Callable[[str], str]  # of a submission's file, "" if it has none
    is_used: Callable[[str], bool]  # whether a submission has the file with this hash

    async def record(self, key: str, id: str, content_hash: str, remove: Callable[[str, str], None]) -> None:
        """Record a file that has its name. `remove`: of this file if it is refused, else of the one that it replaces."""
        before, unused = self.hash_of(id), content_hash
        try:
            self.stored(key, id, content_hash)
            unused = before
        finally:
            if unused and not self.is_used(unused):
                await asyncio.to_thread(remove, self.name, unused)


class Transfers:
    def __init__(self, bucket: "Bucket", max_bytes: int) -> None:
        self.bucket = bucket
        self.max_bytes = max_bytes
        self._announced: dict[tuple[str, str], set[str]] = {}  # SHA-256 of each, until one is stored
        self._storing = asyncio.Lock()

    def grant(self, key: str, kind: FileKind, id: str, file: Announced) -> Grant:
        kind.may_store(key, id, "")
        if file.size_bytes > self.max_bytes:
            raise PoolError(f"a file of {file.size_bytes} bytes; at most {self.max_bytes} are allowed here", 413)
        announced = self._announced.setdefault((kind.name, id), set())
        if len(announced | {file.sha256}) > MOST_FILES:
            raise PoolError(f"{MOST_FILES} other files were announced for {id}; take a new task")
        announced.add(file.sha256)
        made = self.bucket.grant(kind.name, id, file.size_bytes, file.sha256)
        return Grant(url=made.url, headers=made.headers)

    async def stored(self, key: str, kind: FileKind, id: str, file: Announced) -> Stored:
        kind.may_store(key, id, "")
        if file.sha256 not in self._announced.get((kind.name, id), set()):
            raise PoolError(f"announce the file of {id} first", 425)  # the node begins again with that
        async with self._storing:  # one at a time: each is read
            kind.may_store(key, id, "")
            try:
                content_hash = await asyncio.to_thread(self.bucket.check, kind.name, id, file.size_bytes, file.sha256)
                await self._name(key, kind, id, file, content_hash)
            except StoreError as error:
                raise PoolError(str(error), 425) from error
            await kind.record(key, id, content_hash, self.bucket.remove)
            self._announced.pop((kind.name, id), None)
        return Stored(size_bytes=file.size_bytes, hash=content_hash)

    async def _name(self, key: str, kind: FileKind, id: str, file: Announced, content_hash: str) -> None:
        """Give a file that came its name, or remove it if the pool does not take it. Raises PoolError, StoreError."""
        try:
            kind.may_store(key, id, content_hash)
        except PoolError:
            await asyncio.to_thread(self.bucket.drop, kind.name, id, file.sha256)
            raise
        await asyncio.to_thread(self.bucket.keep, kind.name, id, file.sha256, content_hash)

    def link(self, kind: FileKind, id: str) -> Link:
        content_hash = kind.hash_of(id)
        if not content_hash:
            raise PoolError(f"there is no {kind.name} file of {id}", 404)
        return Link(url=self.bucket.link(kind.name, content_hash), hash=content_hash)


def open_transfers(config: Config) -> Transfers | None:
    """None: the store is a folder. Raises StoreError without credentials."""
    section = config.store
    if not section.url:
        return None
    from shoal.store.bucket import Bucket, Place  # needs the extra `s3`

    bucket = Bucket(Place.of(section.url, section.endpoint, section.region))
    return Transfers(bucket, config.coordinator.max_submission_bytes)
