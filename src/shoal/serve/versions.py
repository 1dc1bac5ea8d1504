"""The versions that are in memory, and the newest one: requests take a version, and a live run brings new ones.

    poll the source -> load a new version in a thread -> from now on it is the newest; the one before ends its rows first

A source is a model, the folder of a run (live or finished), or a folder of fetched versions:

    runs/quickstart     learner/versions/v000016 and the model it began with (version 0)
    weights             v000003, v000004, ...: what `shoal fetch URL --out weights --follow` keeps
    bundled:tiny, PATH  one model

Invariant: an offer's folder holds complete weights when it is listed; a live run may remove it later. A version that rows
are decoded from is never evicted or overwritten. One version is loaded at a time, and at most `places` (two or more) are in
memory. A version that vanished before it was loaded is an error of that request alone.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from shoal import config as config_module
from shoal.config import Config
from shoal.engine.rows import token_bytes
from shoal.engine.torch_engine import TorchEngine
from shoal.errors import UserError
from shoal.model import sources
from shoal.model.load import WEIGHTS, eos_ids, load_tokenizer
from shoal.model.sources import positions, read_config
from shoal.serve.errors import NoPlaceError, UnknownVersionError
from shoal.shardcast.manifest import parse_version

CONFIG = "config.toml"
COUNTED = (".json", ".jinja", ".safetensors", ".txt", ".model")  # suffixes of the files that make up a model
VERSIONS = Path("learner") / "versions"


@dataclass(frozen=True)
class Offer:
    """One set of weights. `version` is None for a model outside of any run."""

    id: str
    version: int | None
    folder: Path


@dataclass(frozen=True)
class ModelSource:
    """`name` is the newest version; `name@7` is version 7."""

    name: str
    folder: Path | None  # of the versions; None: one model
    base: Path | None  # the model itself, or the one that the run began with
    config: Config | None = None  # the run's

    def offers(self) -> list[Offer]:
        """What can be loaded now, newest first."""
        if self.folder is None:
            return [Offer(self.name, None, self.base)] if self.base else []
        found: dict[int, Path] = {0: self.base} if self.base else {}
        for path in self.folder.glob("v*"):
            version = parse_version(path.name)
            if version is not None and (path / WEIGHTS).exists():
                found[version] = path
        return [Offer(f"{self.name}@{version}", version, found[version]) for version in sorted(found, reverse=True)]


def source_of(what: str) -> ModelSource:
    """The source that a person named: a run's folder, a folder of versions, or a model. Raises UserError,
    ModelNotFoundError, ConfigError."""
    path, name = Path(what).expanduser(), label_of(what, [what])
    if path.is_dir() and (path / CONFIG).is_file():
        config = config_module.load(path / CONFIG)
        return ModelSource(name, path / VERSIONS, _base(config.model.name), config)
    if path.is_dir() and not (path / "config.json").is_file():
        if any(parse_version(one.name) is not None for one in path.iterdir()):
            return ModelSource(name, path, None)
        raise UserError(
            f"{path} holds neither a run ({CONFIG}), a model (config.json) nor versions (v000001); name one of these"
        )
    return ModelSource(name.removeprefix("bundled:"), None, path if path.is_dir() else sources.resolve(what))


def _base(name: str) -> Path | None:
    """The model that a run began with, if it is on this machine."""
    try:
        return sources.resolve(name)
    except sources.ModelNotFoundError:
        return None


def label_of(name: str, names: Sequence[str]) -> str:
    """The last part of a path or name, or all of it where another model has the same last part.

    >>> label_of("runs/a", ["runs/a", "runs/b"]), label_of("a/model", ["a/model", "b/model"])
    ('a', 'a/model')
    """

    def last(one: str) -> str:
        return one.rstrip("/").rpartition("/")[2] or one

    return last(name) if [last(other) for other in names].count(last(name)) == 1 else name


def digest(folder: Path) -> str:
    """BLAKE3 over names and contents of the files that make up a model."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in COUNTED)
    whole = blake3()
    for path in files:
        one = blake3(max_threads=blake3.AUTO)
        one.update_mmap(path.resolve())
        whole.update(f"{path.name} {one.hexdigest()}\n".encode())
    return whole.hexdigest()


POLL_S = 1.0
PLACES = 3  # versions in memory
WAITING = 8  # requests that may wait for versions to be loaded
UNSTATED = 4096  # positions of a model that states none


@dataclass
class LoadedModel:
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
    source: ModelSource
    new_engine: Callable[[], TorchEngine]
    places: int = PLACES
    newest: LoadedModel | None = None
    failure: str = ""  # why the newest version could not be loaded
    _held: dict[str, LoadedModel] = field(default_factory=dict)
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
    async def take(self, id: str) -> AsyncIterator[LoadedModel]:
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

    async def _find(self, id: str) -> LoadedModel:
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

    async def _load(self, offer: Offer) -> LoadedModel:
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
                raise NoPlaceError(f"all {self.places} versions in memory are in use; try again")
            oldest = min(idle, key=lambda held: held.used)
            del self._held[oldest.id]
            self._spare.append(oldest.engine)

    def close(self) -> None:
        """A load under way is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def load(offer: Offer, engine: TorchEngine) -> LoadedModel:
    """Read a version into an engine, all of it. Raises OSError."""
    engine.load(offer.folder)
    tokenizer = load_tokenizer(offer.folder)
    places = positions(read_config(str(offer.folder.resolve()), fetch=False)) or UNSTATED
    return LoadedModel(
        offer=offer,
        engine=engine,
        digest=digest(offer.folder),
        tokenizer=tokenizer,
        eos_ids=eos_ids(offer.folder),
        positions=places,
        characters=places * max(map(len, tokenizer.get_vocab())),
        token_bytes=token_bytes(engine.model),
    )
