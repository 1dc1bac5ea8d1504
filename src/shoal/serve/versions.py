"""The policy versions in memory: requests borrow one, and a live run adds new ones.

    poll the source -> load a new version in a thread -> make it the newest; running requests finish on the previous one

A source is a model, the folder of a run (live or finished), or a folder of fetched versions:

    runs/quickstart     learner/versions/v000016 and the base model (version 0)
    weights             v000003, v000004, ...: the versions that `shoal fetch URL --out weights --follow` keeps
    bundled:tiny, PATH  one model

Invariant: a version in use is never evicted or overwritten. When an offer is listed, its folder holds complete weights;
a live run may remove the folder later. One version is loaded at a time, and at most `max_loaded` (three or more) are in
memory. Requests may use `max_loaded` - 2 of the older ones at the same time, so a slot is left for the next version. Two
versions that were in use when a newer one came block the next one until the replies on one of them end. If a version is
removed before it is loaded, only the request for it fails. Users of the page, who may be strangers, may load few older
versions, because each load reads and hashes all its weights.
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
from shoal.engine import selftest
from shoal.engine.rows import token_bytes
from shoal.engine.torch_engine import TorchEngine
from shoal.errors import UserError, user_path
from shoal.model import numerics, sources
from shoal.model.load import WEIGHTS, eos_ids, load_tokenizer
from shoal.model.sources import ModelNotFoundError, positions, read_config
from shoal.serve.errors import NoSlotError, UnknownVersionError
from shoal.serve.threads import FairSemaphore
from shoal.shardcast.manifest import parse_version
from shoal.watch.page.guard import RateLimit

CONFIG = "config.toml"
MODEL_SUFFIXES = (".json", ".jinja", ".safetensors", ".txt", ".model")  # files that `digest` covers
VERSIONS = Path("learner") / "versions"


@dataclass(frozen=True)
class Offer:
    """A version that can be loaded. `version` is None for a model that belongs to no run."""

    id: str
    version: int | None
    folder: Path


@dataclass(frozen=True)
class ModelSource:
    """Where versions come from. A request for model `name` gets the newest version; `name@7` is version 7."""

    name: str
    folder: Path | None  # holds the versions; None if the source is a single model
    base: Path | None  # the single model, or the run's base model
    config: Config | None = None  # the run's config

    def offers(self) -> list[Offer]:
        """List the versions that can be loaded now, newest first."""
        if self.folder is None:
            return [Offer(self.name, None, self.base)] if self.base else []
        folders: dict[int, Path] = {0: self.base} if self.base else {}
        for path in self.folder.glob("v*"):
            version = parse_version(path.name)
            if version is not None and (path / WEIGHTS).exists():
                folders[version] = path
        return [Offer(f"{self.name}@{version}", version, folders[version]) for version in sorted(folders, reverse=True)]


def source_of(what: str) -> ModelSource:
    """Return the source for a run's folder, a folder of versions, or a model.

    Raise UserError, ModelNotFoundError or ConfigError.
    """
    path, name = user_path(what), label_of(what, [what])
    if path.is_dir() and (path / CONFIG).is_file():
        config = config_module.load(path / CONFIG)
        return ModelSource(name, path / VERSIONS, _base(config.model.name), config)
    if path.is_dir() and not (path / "config.json").is_file():
        if any(parse_version(child.name) is not None for child in path.iterdir()):
            return ModelSource(name, path, None)
        raise UserError(
            f"{path} holds neither a run ({CONFIG}), a model (config.json) nor versions (v000001); name one of these"
        )
    return ModelSource(name.removeprefix("bundled:"), None, path if path.is_dir() else sources.resolve(what))


def _base(name: str) -> Path | None:
    """Return the run's base model, if it is on this machine."""
    try:
        return sources.resolve(name)
    except sources.ModelNotFoundError:
        return None


def label_of(name: str, names: Sequence[str]) -> str:
    """Return the last part of a path or name. Return all of it if another model's name ends with the same part.

    >>> label_of("runs/a", ["runs/a", "runs/b"]), label_of("a/model", ["a/model", "b/model"])
    ('a', 'a/model')
    """

    def last(path: str) -> str:
        return path.rstrip("/").rpartition("/")[2] or path

    return last(name) if [last(other) for other in names].count(last(name)) == 1 else name


def digest(folder: Path) -> str:
    """Return the BLAKE3 digest of the names and contents of a model's files."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in MODEL_SUFFIXES)
    combined = blake3()
    for path in files:
        content = blake3()  # in one thread, because running replies need the other cores
        content.update_mmap(path.resolve())
        combined.update(f"{path.name} {content.hexdigest()}\n".encode())
    return combined.hexdigest()


POLL_S = 1.0
MAX_LOADED = 4  # versions in memory: the newest, the next one, and two older ones to compare
USER_LOADS, PAGE_LOADS, LOADS_S = 20, 60, 600.0  # older versions per LOADS_S, for one user of the page and for all
DEFAULT_POSITIONS = 4096  # context length of a model whose config does not state one


@dataclass
class LoadedModel:
    """A version in memory."""

    offer: Offer
    engine: TorchEngine
    digest: str  # BLAKE3 of its files
    tokenizer: Any
    eos_ids: tuple[int, ...]
    positions: int
    max_characters: int  # upper bound on the length of a text that fits the context
    token_bytes: int  # bytes of KV cache per token
    fingerprint: str = ""  # names its exactness class (`engine.selftest`); "": results may depend on the batch
    users: int = 0
    last_used: int = 0  # `Versions._clock` at its last use
    _texts: dict[int, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.offer.id

    def text(self, token: int) -> str:
        """Decode one token by itself. The text is cached."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = str(self.tokenizer.decode([token]))
        return text


@dataclass
class Versions:
    source: ModelSource
    new_engine: Callable[[], TorchEngine]
    max_loaded: int = MAX_LOADED
    newest: LoadedModel | None = None
    failure: str = ""  # why the newest version could not be loaded
    _loaded: dict[str, LoadedModel] = field(default_factory=dict)
    _spare: list[TorchEngine] = field(default_factory=list)  # evicted engines, to reuse their memory
    _offers: list[Offer] = field(default_factory=list)
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _turns: FairSemaphore = field(default_factory=lambda: FairSemaphore(1))  # to load an older version
    _user_loads: RateLimit = field(default_factory=lambda: RateLimit(USER_LOADS, LOADS_S))
    _page_loads: RateLimit = field(default_factory=lambda: RateLimit(PAGE_LOADS, LOADS_S))
    _clock: int = 0
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "loader"))

    def offers(self) -> list[Offer]:
        """Return the offers of the last poll, newest first."""
        return self._offers

    def is_loaded(self, id: str) -> bool:
        return id in self._loaded

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
                self.newest = await self._get(self._offers[0])
            self.failure = ""
        except NoSlotError as error:
            self.failure = str(error)  # the next poll tries again
        except (OSError, UnknownVersionError) as error:
            if not self.newest:
                raise
            self.failure = str(error)  # the folder was removed before it was read; the next poll tries again

    @asynccontextmanager
    async def borrow(self, id: str, caller: str, *, page: bool = False) -> AsyncIterator[LoadedModel]:
        """Borrow version `id`, and load it first if needed. It is not evicted while it is borrowed.

        If `id` is the source's name, borrow the newest version. `page`: the caller is a user of the page, whose loads
        are limited. Raise UnknownVersionError, NoSlotError, BusyError, or HttpError if the limit is reached.
        """
        loaded = await self._find(id, caller, page)
        if loaded is not self.newest:
            self._check_older(loaded.id)
        loaded.users += 1
        self._clock += 1
        loaded.last_used = self._clock
        try:
            yield loaded
        finally:
            loaded.users -= 1

    async def _find(self, id: str, caller: str, page: bool) -> LoadedModel:
        if id == self.source.name and self.newest:
            return self.newest
        if id in self._loaded:
            return self._loaded[id]
        if self.newest is None:
            raise NoSlotError(f"{self.source.name} is being loaded; try again")
        offer = next((offer for offer in self._offers if offer.id == id), None)
        if offer is None:
            raise UnknownVersionError(f"there is no model {id[:100]!r}; GET /v1/models lists the models")
        await self._turns.acquire(caller)
        try:
            async with self._loading:
                self._check_older(id)
                if page and id not in self._loaded:
                    self._user_loads.take(caller, "older versions loaded for you")
                    self._page_loads.take("all", "older versions loaded for this page")
                return await self._get(offer)
        finally:
            self._turns.release(caller)

    def _check_older(self, id: str) -> None:
        """Raise NoSlotError if, with version `id` in use too, no slot would be left for the next version."""
        in_use = [each.id for each in self._loaded.values() if each.users and each is not self.newest and each.id != id]
        if len(in_use) >= self.max_loaded - 2:
            raise NoSlotError(
                f"requests to {', '.join(in_use)} are running, so no other older version fits in memory; "
                f"try again when they have ended, or choose {self.source.name}"
            )

    async def _get(self, offer: Offer) -> LoadedModel:
        """Return a version, and load it first if needed."""
        if offer.id in self._loaded:
            return self._loaded[offer.id]
        self._evict()
        spare = self._spare.pop() if self._spare else None
        loop = asyncio.get_running_loop()
        try:
            loaded = await loop.run_in_executor(self._thread, lambda: load(offer, spare or self.new_engine()))
        except (OSError, ModelNotFoundError) as error:
            raise UnknownVersionError(f"{offer.id} could not be read: {error}; choose another version") from error
        self._loaded[offer.id] = loaded
        return loaded

    def _evict(self) -> None:
        """Evict unused versions, least recently used first, until one more fits."""
        while len(self._loaded) >= self.max_loaded:
            idle = [loaded for loaded in self._loaded.values() if not loaded.users and loaded is not self.newest]
            if not idle:
                raise NoSlotError(f"all {self.max_loaded} versions in memory are in use; try again")
            oldest = min(idle, key=lambda loaded: loaded.last_used)
            del self._loaded[oldest.id]
            self._spare.append(oldest.engine)

    def close(self) -> None:
        """Stop without waiting for a load in progress."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def load(offer: Offer, engine: TorchEngine) -> LoadedModel:
    """Load a version into an engine. Raise OSError or ModelNotFoundError if its folder was removed."""
    engine.load(offer.folder)
    exact = numerics.of(engine.model) == "exact" and selftest.passes(engine.model, engine.dtype, engine.device)
    tokenizer = load_tokenizer(offer.folder)
    context = positions(read_config(str(offer.folder.resolve()), fetch=False)) or DEFAULT_POSITIONS
    return LoadedModel(
        offer=offer,
        engine=engine,
        digest=digest(offer.folder),
        tokenizer=tokenizer,
        eos_ids=eos_ids(offer.folder),
        positions=context,
        max_characters=context * max(map(len, tokenizer.get_vocab())),
        token_bytes=token_bytes(engine.model),
        fingerprint=selftest.fingerprint(engine.model) if exact else "",
    )
