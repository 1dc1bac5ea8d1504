"""The server's view of a store: which shards may be requested, and how much was sent.

Invariant: a manifest is parsed once each time it is written, and of each shard only the hash is kept. So a request costs
one `stat`, whatever the size of the version.
Called by `server`. The store's writer, in this process or another, has verified the manifests' signatures.
Left out: a log of requests, except for leases (see store.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shoal.shardcast.format.manifest import ManifestError, Part, Stream
from shoal.shardcast.store import Store

MAX_PARSED = 64
MAX_PATHS = 4096
HASH_BYTES = 32


@dataclass(frozen=True)
class Held:
    """The streams of a manifest, with their hashes as bytes."""

    streams: dict[Part, Stream]
    hashes: dict[Part, bytes]

    def shard_bytes(self, part: Part, index: int) -> int:
        """The size of a shard, 0 if there is no such shard."""
        stream = self.streams.get(part)
        if stream is None:
            return 0
        return max(0, min(stream.shard_size_bytes, stream.size_bytes - index * stream.shard_size_bytes))

    def shard_hash(self, part: Part, index: int) -> str:
        """In hex; "" while the manifest does not name it yet."""
        return self.hashes[part][index * HASH_BYTES : (index + 1) * HASH_BYTES].hex()


class Shelf:
    """A store with its parsed manifests and a count of sent bytes."""

    def __init__(self, store: Store, wait_s: float) -> None:
        self.store, self.wait_s = store, wait_s
        # Cached, because every request needs one.
        self.manifest_path = lru_cache(MAX_PARSED)(store.manifest_path)
        self.shard_path = lru_cache(MAX_PATHS)(store.shard_path)
        self.served_bytes = 0  # of bodies that were sent completely
        self._parsed: dict[int, tuple[tuple[int, ...], Held]] = {}

    def held(self, version: int) -> Held | None:
        """None if the version is not here, or its manifest is damaged."""
        path = self.manifest_path(version)
        try:
            stat = path.stat()
            seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if version not in self._parsed or self._parsed[version][0] != seen:
                self._keep(version, seen, _parse(self.store, version))
            return self._parsed[version][1]
        except (FileNotFoundError, ManifestError):
            self._parsed.pop(version, None)
            return None

    def _keep(self, version: int, seen: tuple[int, ...], held: Held) -> None:
        self._parsed[version] = (seen, held)
        if len(self._parsed) > MAX_PARSED:
            del self._parsed[next(iter(self._parsed))]


def _parse(store: Store, version: int) -> Held:
    """Raises FileNotFoundError, ManifestError. The store's writer has verified the signature."""
    signed = store.signed(version)
    if signed is None:
        raise FileNotFoundError
    manifest = signed.unchecked()
    streams = {part: stream.model_copy(update={"shards": ()}) for part, stream in manifest.streams.items()}
    hashes = {part: bytes.fromhex("".join(stream.shards)) for part, stream in manifest.streams.items()}
    return Held(streams, hashes)
