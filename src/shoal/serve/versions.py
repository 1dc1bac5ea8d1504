"""The versions that are in memory, and the newest one: requests take a version, and a live run brings new ones.

    poll the source -> load a new version in a thread -> from now on it is the newest; the one before ends its rows first

Invariant: a version that rows are decoded from is never evicted or overwritten. One version is loaded at a time, and at most
`places` (two or more) are in memory. A version that vanished before it was loaded is an error of that request alone.
Called by `service` (which follows) and by the routes (`take`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from shoal.engine.rows import token_bytes
from shoal.engine.torch_engine import TorchEngine
from shoal.errors import ShoalError
from shoal.evals.local import digest
from shoal.model.load import eos_ids, load_tokenizer
from shoal.model.positions import positions
from shoal.model.sources import read_config
from shoal.serve.sources import Offer, Source

POLL_S = 1.0
WAITING = 8  # requests that may wait for versions to be loaded
UNSTATED = 4096  # positions of a model that states none


class UnknownVersionError(ShoalError):
    """There is no such version here."""


class NoPlaceError(ShoalError):
    """All places for versions are in use."""

    restart_helps = True


@dataclass
class Held:
    """A version in memory."""

    offer: Offer
    engine: TorchEngine
    digest: str  # BLAKE3 of its files
    tokenizer: Any
    eos_ids: tuple[int, ...]
    positions: int
    characters: int  # of the longest text that may fit the positions
    token_bytes: int  # of keys and values
    users: int = 0
    used: int = 0  # when it was last taken, as a count
    guide: Any = None  # its tokenizer as `grammar` needs it, once it was needed
    _texts: dict[int, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.offer.id

    def text(self, token: int) -> str:
        """Of a token that stands alone."""
        found = self._texts.get(token)
        if found is None:
            found = self._texts[token] = str(self.tokenizer.decode([token]))
        return found


@dataclass
class Versions:
    source: Source
    new_engine: Callable[[], TorchEngine]
    places: int = 3
    newest: Held | None = None
    failure: str = ""  # why the newest version could not be loaded
    _held: dict[str, Held] = field(default_factory=dict)
    _spare: list[TorchEngine] = field(default_factory=list)  # evicted engines, whose memory is used again
    _offers: list[Offer] = field(default_factory=list)
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: int = 0
    _clock: int = 0
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "loader"))

    def offers(self) -> list[Offer]:
        """What was there at the last poll, newest first."""
        return self._offers

    def is_loaded(self, id: str) -> bool:
        return id in self._held

    async def follow(self) -> None:
        """Load each newest version as it appears, until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        self._offers = await asyncio.to_thread(self.source.offers)
        if not self._offers or (self.newest and self.newest.offer == self._offers[0]):
            return
        try:
            async with self._loading:
                self.newest = await self._load(self._offers[0])
            self.failure = ""
        except NoPlaceError as error:
            self.failure = str(error)  # the next poll tries again
        except (OSError, UnknownVersionError) as error:
            if not self.newest:
                raise
            self.failure = str(error)  # removed meanwhile; the next poll sees what is there

    @asynccontextmanager
    async def take(self, id: str) -> AsyncIterator[Held]:
        """The version called `id` (the source's name: the newest), loaded; it stays while it is used.

        Raises UnknownVersionError, NoPlaceError.
        """
        held = await self._find(id)
        held.users += 1
        self._clock += 1
        held.used = self._clock
        try:
            yield held
        finally:
            held.users -= 1

    async def _find(self, id: str) -> Held:
        if id == self.source.name and self.newest:
            return self.newest
        if id in self._held:
            return self._held[id]
        if self.newest is None:
            raise NoPlaceError(f"{self.source.name} is being loaded; try again")
        offer = next((offer for offer in self._offers if offer.id == id), None)
        if offer is None:
            raise UnknownVersionError(f"there is no model {id[:100]!r}; GET /v1/models lists those that there are")
        if self._waiting >= WAITING:
            raise NoPlaceError("other versions are being loaded; try again")
        self._waiting += 1
        try:
            async with self._loading:
                return self._held.get(id) or await self._load(offer)
        finally:
            self._waiting -= 1

    async def _load(self, offer: Offer) -> Held:
        self._make_place()
        spare = self._spare.pop() if self._spare else None
        loop = asyncio.get_running_loop()
        try:
            held = await loop.run_in_executor(self._thread, lambda: load(offer, spare or self.new_engine()))
        except OSError as error:
            raise UnknownVersionError(f"{offer.id} could not be read: {error}; choose another version") from error
        self._held[offer.id] = held
        return held

    def _make_place(self) -> None:
        """Evict the versions that are not used, the longest unused first, until there is a place."""
        while len(self._held) >= self.places:
            idle = [held for held in self._held.values() if not held.users and held is not self.newest]
            if not idle:
                raise NoPlaceError(f"all {self.places} versions in memory are in use; try again, or raise --versions")
            oldest = min(idle, key=lambda held: held.used)
            del self._held[oldest.id]
            self._spare.append(oldest.engine)

    def close(self) -> None:
        """A load under way is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def load(offer: Offer, engine: TorchEngine) -> Held:
    """Read a version into an engine, all of it. Raises OSError."""
    engine.forget()
    engine.load(offer.folder)
    tokenizer = load_tokenizer(offer.folder)
    places = positions(read_config(str(offer.folder.resolve()), fetch=False)) or UNSTATED
    return Held(
        offer=offer,
        engine=engine,
        digest=digest(offer.folder),
        tokenizer=tokenizer,
        eos_ids=eos_ids(offer.folder),
        positions=places,
        characters=places * max(map(len, tokenizer.get_vocab())),
        token_bytes=token_bytes(engine.model),
    )
