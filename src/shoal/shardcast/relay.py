"""The relay: keeps a store equal to the newest versions upstream, and passes shards on while they arrive.

Invariant: a version is announced only after its manifest was opened with the learner's key, and a shard gets
its name only after its hash matched; so whatever upstream does, this store holds nothing the learner did not
publish.
Called by the relay process beside `server.app` over the same store.
Left out: shards pushed by upstream, choosing the upstream by throughput (see failover.py), and dropping a
version that is half mirrored when a newer one appears (clients may be in the middle of it).
Paper: INTELLECT-2, SHARDCAST: relays mirror the origin and serve shards before the version is whole
(pipelined).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .failover import FetchError, Sources, open_sources
from .http_source import BadData, NotHeld, Offer, Source
from .manifest import Manifest, ManifestError, ShardEntry
from .store import Store, new_file


@dataclass
class RelayStatus:
    versions: list[int] = field(default_factory=list)  # whole and checked by this process, newest first
    mirroring: int | None = None
    bytes_in: int = 0
    last_error: str | None = None  # stays until the next one


class Relay:
    """One per store: the only writer of it. An upstream is an origin or a relay; none is trusted."""

    def __init__(
        self,
        upstream: Sequence[str],
        store: Path,
        *,
        public_key: str,
        run: str | None = None,
        keep: int = 5,
        parallel: int = 3,
        poll_s: float = 0.3,
        longest_pause_s: float = 5.0,
        strikes: int = 3,
        connect_timeout_s: float = 5.0,
        idle_timeout_s: float = 30.0,
        answer_timeout_s: float = 30.0,
        patience_s: float = 15.0,
        shard_timeout_s: float = 300.0,
    ) -> None:
        self.upstream = list(upstream)
        self.store = Store(store)
        self.public_key, self.run = public_key, run
        self.keep, self.parallel, self.strikes = keep, parallel, strikes
        self.poll_s, self.longest_pause_s = poll_s, longest_pause_s
        self.connect_timeout_s, self.idle_timeout_s = connect_timeout_s, idle_timeout_s
        self.answer_timeout_s, self.patience_s = answer_timeout_s, patience_s
        self.shard_timeout_s = shard_timeout_s
        self.status = RelayStatus()
        self.store.recover()
        self._held: dict[int, Manifest] = {}  # announced, whole or not
        # By version and index, filled by one look at the disk: a failing version is not rehashed each round.
        self._missing: dict[int, dict[int, ShardEntry]] = {}
        self._open_held()

    async def mirror(self) -> None:
        """Runs until cancelled. Nothing upstream does ends it; what went wrong last is in `status`."""
        async with open_sources(
            self.upstream,
            public_key=self.public_key,
            run=self.run,
            connect_timeout_s=self.connect_timeout_s,
            idle_timeout_s=self.idle_timeout_s,
            answer_timeout_s=self.answer_timeout_s,
            patience_s=self.patience_s,
            strikes=self.strikes,
            on_failure=self._note,
        ) as sources:
            pause_s = self.poll_s
            while True:
                try:
                    reached = await self._round(sources)
                except OSError as error:  # the disk refused even what makes room
                    reached = False
                    self._note(error)
                pause_s = self.poll_s if reached else min(pause_s * 2, self.longest_pause_s)
                await asyncio.sleep(pause_s)

    async def _round(self, sources: Sources) -> bool:
        """Completes the newest version that is not whole yet, if any; False when no upstream answered."""
        answers, _ = await sources.ask(self._offered)
        offers: dict[int, Offer | None] = {}
        for answer in answers.values():
            offers.update(answer)
        for version in sorted({*offers, *self._held}, reverse=True)[: self.keep]:
            if version in self.status.versions:
                continue
            try:
                if await self._complete(sources, self._adopt(version, offers.get(version)), reachable=bool(answers)):
                    return True
            except (FetchError, OSError) as error:
                self._note(error)  # and go on: the next older one may be had
                if answers and version not in offers:
                    self._drop(version)  # half here, gone upstream: it will never be whole
        return bool(answers)

    async def _offered(self, source: Source) -> dict[int, Offer | None]:
        """What this source has of the newest versions: the checked manifest, or None where it is held here.
        Checked here, source by source: one that lists nonsense or stalls keeps nothing from the others."""
        offers: dict[int, Offer | None] = {}
        for version in (await source.versions())[: self.keep]:
            if version in self._held:
                offers[version] = None
            elif sum(held > version for held in self._held) < self.keep:
                try:
                    offers[version] = await source.manifest(version)
                except (BadData, NotHeld) as error:
                    self._note(error)
        return offers

    def _adopt(self, version: int, offer: Offer | None) -> Manifest:
        if version not in self._held and offer is not None:
            signed, manifest = offer
            self.store.add_manifest(version, signed)
            self._held[version] = manifest
        return self._held[version]

    async def _complete(self, sources: Sources, manifest: Manifest, *, reachable: bool) -> bool:
        """Fetches what is missing. False when that has to wait for upstream; raises FetchError, OSError."""
        version = manifest.version
        if version not in self._missing:
            damaged = await asyncio.to_thread(self.store.damaged, manifest)
            self._missing[version] = {shard.index: shard for shard in damaged}
        missing = self._missing[version]
        if missing and not reachable:
            return False
        self.status.mirroring = version
        queue = deque(missing.values())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.parallel):
                    group.create_task(self._copy(sources, version, queue))
        except ExceptionGroup as errors:
            raise FetchError(str(errors.exceptions[0])) from errors
        finally:
            self.status.mirroring = None
            self.status.bytes_in = sources.received_bytes
        self.store.retain(self.keep)
        kept = self.store.versions()
        self.status.versions = sorted({*self.status.versions, version} & {*kept}, reverse=True)
        self._held = {held: manifest for held, manifest in self._held.items() if held in kept}
        self._missing = {held: missing for held, missing in self._missing.items() if held in kept}
        return True

    async def _copy(self, sources: Sources, version: int, queue: deque[ShardEntry]) -> None:
        while queue:
            shard = queue.popleft()
            deadline_s = time.monotonic() + self.shard_timeout_s
            with new_file(self.store.shard_path(version, shard.index)) as file:
                await sources.shard(version, shard, file.write, deadline_s=deadline_s)
                await asyncio.to_thread(file.commit)
            del self._missing[version][shard.index]
            self.status.bytes_in = sources.received_bytes

    def _open_held(self) -> None:
        for version in self.store.versions():
            try:
                signed = self.store.signed(version)
                if signed is not None:
                    self._held[version] = signed.open(self.public_key, run=self.run, version=version)
            except ManifestError as error:  # another run's, another key's, or damaged on disk
                self._note(error)
                self.store.discard(version)

    def _drop(self, version: int) -> None:
        self.store.discard(version)
        self._held.pop(version, None)
        self._missing.pop(version, None)

    def _note(self, error: Exception) -> None:
        self.status.last_error = str(error)
