"""Files that nodes send to the pool's bucket and fetch from it themselves, by signed URLs.

    announce (size, SHA-256) -> grant -> the node's PUT to the bucket -> stored: checked, named, recorded

Invariant: only a node with the grant's right at that moment gets a URL, and only then is a file recorded. For one task it
may announce MOST_FILES different files, so what a worker can leave in the bucket is bounded. No credential leaves this
process. Called by the routes, where `store.url` is set; else `routes` itself takes and gives the bytes.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from shoal.config import Config
from shoal.coordinator.state.database import PoolError
from shoal.protocol.messages import Announced, Grant, Link, Stored
from shoal.store.folder import StoreError

if TYPE_CHECKING:
    from shoal.store.bucket import Bucket

MOST_FILES = 4  # a restarted worker may make its file again
Kind = Literal["submissions", "accepted"]
Right = Callable[[str, str], None]  # key and submission; raises PoolError


class Transfers:
    def __init__(self, bucket: "Bucket", max_bytes: int) -> None:
        self.bucket = bucket
        self.max_bytes = max_bytes
        self._announced: dict[tuple[Kind, str], set[str]] = {}  # SHA-256 of each, until one is stored
        self._storing = asyncio.Lock()

    def grant(self, key: str, kind: Kind, id: str, file: Announced, right: Right) -> Grant:
        right(key, id)
        if file.size_bytes > self.max_bytes:
            raise PoolError(f"a file of {file.size_bytes} bytes; at most {self.max_bytes} are allowed here", 413)
        announced = self._announced.setdefault((kind, id), set())
        if len(announced | {file.sha256}) > MOST_FILES:
            raise PoolError(f"{MOST_FILES} other files were announced for {id}; take a new task")
        announced.add(file.sha256)
        made = self.bucket.grant(kind, id, file.size_bytes, file.sha256)
        return Grant(url=made.url, headers=made.headers)

    async def stored(
        self, key: str, kind: Kind, id: str, file: Announced, right: Right, record: Callable[[str, str, str], None]
    ) -> Stored:
        right(key, id)
        if file.sha256 not in self._announced.get((kind, id), set()):
            raise PoolError(f"announce the file of {id} first", 425)  # the node begins again with that
        async with self._storing:  # one at a time: each is read
            right(key, id)
            try:
                content_hash = await asyncio.to_thread(self.bucket.keep, kind, id, file.size_bytes, file.sha256)
            except StoreError as error:
                raise PoolError(str(error), 425) from error
            right(key, id)
            record(key, id, content_hash)
            self._announced.pop((kind, id), None)
        return Stored(size_bytes=file.size_bytes, hash=content_hash)

    def link(self, kind: Kind, content_hash: str, id: str) -> Link:
        if not content_hash:
            raise PoolError(f"there is no {kind} file of {id}", 404)
        return Link(url=self.bucket.link(kind, content_hash), hash=content_hash)


def open_transfers(config: Config) -> Transfers | None:
    """None: the store is a folder. Raises StoreError without credentials."""
    section = config.store
    if not section.url:
        return None
    from shoal.store.bucket import Bucket, Place  # needs the extra `s3`

    bucket = Bucket(Place.of(section.url, section.endpoint, section.region))
    return Transfers(bucket, config.coordinator.max_submission_bytes)
