"""A store as its server sees it: what may be asked for, and how much was sent.

Invariant: a manifest is parsed once for each time it was written, and its hashes are not kept, so that a request costs
a look at the file's date whatever the size of the version.
Called by `server`. The store's writer, in this process or another, has checked the manifests' signatures.
Left out: what readers asked for, beyond the lease (see store.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shoal.shardcast.format.manifest import ManifestError, Part, Stream
from shoal.shardcast.store import Store

MAX_PARSED = 64
MAX_PATHS = 4096


@dataclass(frozen=True)
class Held:
    """What a manifest says about what may be asked for, without its hashes."""

    complete: bool
    streams: dict[Part, Stream]

    def shard_bytes(self, part: Part, index: int) -> int:
        """The size of a shard, 0 where there is none."""
        stream = self.streams.get(part)
        if stream is None:
            return 0
        return max(0, min(stream.shard_size_bytes, stream.size_bytes - index * stream.shard_size_bytes))


class Shelf:
    """A store, what its manifests say (parsed once for each time they are written), and what was sent of it."""

    def __init__(self, store: Store, wait_s: float) -> None:
        self.store, self.wait_s = store, wait_s
        # Else each request would build them anew.
        self.manifest_path = lru_cache(MAX_PARSED)(store.manifest_path)
        self.shard_path = lru_cache(MAX_PATHS)(store.shard_path)
        self.served_bytes = 0  # of bodies that have gone out whole
        self._parsed: dict[int, tuple[tuple[int, ...], Held]] = {}

    def held(self, version: int) -> Held | None:
        """None where the version is not here, or its manifest is damaged."""
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
    """Raises FileNotFoundError, ManifestError. The store's writer has checked the signature."""
    signed = store.signed(version)
    if signed is None:
        raise FileNotFoundError
    manifest = signed.unchecked()
    streams = {part: stream.model_copy(update={"shards": ()}) for part, stream in manifest.streams.items()}
    return Held(manifest.complete, streams)
