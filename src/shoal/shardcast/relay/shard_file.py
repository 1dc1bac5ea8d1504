"""A shard that is being written into a store. The server reads the growing file, and a restart resumes it.

Called by the relay; the client's counterpart is `partial.PartialShard`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from shoal.files import CHUNK_BYTES
from shoal.shardcast.format.manifest import Part, ShardEntry
from shoal.shardcast.store import Store


class ShardFile:
    """See `download.ShardSink`."""

    def __init__(self, store: Store, version: int, part: Part, shard: ShardEntry) -> None:
        self.shard = shard
        self.file = store.new_shard(version, part, shard.index, resume=True)
        self.file.kept = True

    def begun(self) -> Iterator[bytes]:
        if self.file.size_bytes > self.shard.size_bytes:
            self.restart()
        for at in range(0, self.file.size_bytes, CHUNK_BYTES):
            yield self.file.read(at, CHUNK_BYTES)

    def write(self, offset_bytes: int, data: bytes) -> None:
        self.file.write(offset_bytes, data)

    def restart(self) -> None:
        self.file.truncate()

    def done(self) -> None:
        self.file.commit(durable=False)
        self.file.kept = False

    def close(self) -> None:
        with suppress(FileNotFoundError):
            self.file.close()
