"""Several runs at one listener: one process and one address, and for each run its own folder, database, key and config.

    FOLDER/identity.pem   the listener's key: signs the list of runs
    FOLDER/PLACE/         a pool's folder (`shoal pool init --dir FOLDER/PLACE --url URL/runs/PLACE`), served at /runs/PLACE;
                          PLACE has only a to z, 0 to 9 and -; folders with other names are ignored
    FOLDER/PLACE/closed   its operator closed it (`shoal pool close`)

Invariant: a run that cannot be opened, fails, or is closed does not affect the others: its place answers 503 from then on,
which nodes take for a coordinator that is away. What is signed for one run is refused by every other, because path and
audience are signed, and no two runs of a listener have one audience. The limits of strangers hold for the listener as a
whole.
Called by `shoal coordinator --runs`. Left out: `coordinator.database` and remote trackers, which take a process of their
own; opening a run while others are served (nodes wait for a restart); a run whose disk hangs, which holds up all others.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from shoal.config import Config
from shoal.coordinator.http.serving import POLL_S, ServedRun, attach_board, listening, offer
from shoal.coordinator.state.folder import CLOSED, KEY
from shoal.errors import ShoalError
from shoal.protocol.address import FILE as ADDRESS
from shoal.protocol.address import PLACE, Address, split_url
from shoal.protocol.identity import Identity
from shoal.protocol.messages import MOST_RUNS, VERSION, ClosedRun, RunOffer
from shoal.protocol.server import IDENTITY, Front, refusal

BY_OPERATOR = "its operator closed it"  # what strangers hear; the log has the reason
BY_FAULT = "its coordinator failed"
PROCESS_WIDE = ("wandb", "trackio")  # trackers that know one run in a process

Load = Callable[[Path], tuple[Config, Address]]  # of a run's folder; may raise anything

log = logging.getLogger(__name__)
speaking: ContextVar[str] = ContextVar("speaking", default="")  # the place whose log this is


class SharingError(ShoalError):
    """A listener without a run to serve, or whose run cannot share it; the message says what to do."""


class Place:
    """Where one run is found: its routes while it is served, a refusal afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.run: ServedRun | None = None
        self.url = ""
        self.why = ""  # it is closed; "": it is served
        self.failed = False
        self._under_way: set[asyncio.Task[object]] = set()

    def open(self, load: Load, front: Front, taken: dict[str, str]) -> None:
        """Open the run; on any error close the place. `taken`: places by the ids of their runs."""
        speaking.set(self.name)
        if (self.folder / CLOSED).exists():
            self.why = BY_OPERATOR
            return
        try:
            config, address = load(self.folder)
            _check(config, address, self.name, taken)
            self.run, self.url = ServedRun(config, address.run, self.folder, front=front), address.url
            offer(self.run.coordinator, self.folder, self.name, self.url)
        except Exception as error:  # noqa: BLE001 - a fault of one run must not stop the others
            self._fail("is not served", error)
        else:
            taken[address.run] = self.name

    def application(self) -> web.Application:
        application = self.run.coordinator.routes() if self.run else web.Application()
        application.middlewares.append(self._pass)
        return application

    async def live(self, stop: threading.Event) -> None:
        """Serve the run until it is closed, it fails, or `stop`."""
        if self.run is None or self.why:
            return
        speaking.set(self.name)
        living = asyncio.create_task(self.run.live(stop))
        while not living.done():
            await asyncio.wait([living], timeout=POLL_S)
            if (self.folder / CLOSED).exists():
                self.why = BY_OPERATOR
                living.cancel()
        try:
            await living
        except asyncio.CancelledError:
            log.info("closed by its operator")
        except Exception as error:  # noqa: BLE001 - a fault of one run must not stop the others
            self._fail("is served no longer", error)
        if self.why:
            await self._end_requests()
            self.close()

    def close(self) -> None:
        """The run's last words, once."""
        speaking.set(self.name)
        run, self.run = self.run, None
        if run is None:
            return
        try:
            run.close()
        except Exception as error:  # noqa: BLE001 - likewise
            self._fail("is not sealed", error)

    def listed(self) -> RunOffer | ClosedRun:
        if self.run is None or self.why:
            return ClosedRun(place=self.name, why=self.why)
        try:
            return offer(self.run.coordinator, self.folder, self.name, self.url)
        except Exception as error:  # noqa: BLE001 - likewise: the list has the other runs
            log.error("the run at /runs/%s cannot be listed: %s", self.name, error)
            return ClosedRun(place=self.name, why=BY_FAULT)

    def _fail(self, what: str, error: Exception) -> None:
        self.why, self.failed = BY_FAULT, True
        explained = isinstance(error, ShoalError | OSError)
        log.error("the run %s: %s", what, error or type(error).__name__, exc_info=None if explained else error)

    @web.middleware
    async def _pass(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.why:
            return refusal(503, f"this run is closed: {self.why}")
        task, before = asyncio.current_task(), speaking.set(self.name)
        assert task is not None
        self._under_way.add(task)
        try:
            return await handler(request)
        finally:
            self._under_way.discard(task)
            speaking.reset(before)

    async def _end_requests(self) -> None:
        """Nothing may write once the run is sealed."""
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


def serve_shared(folder: Path, load: Load, stop: threading.Event, *, host: str, port: int, connections: int) -> None:
    """Serve every run in `folder` until `stop`. Raises SharingError if no run could be served, or one failed at any time."""
    places = [Place(path.parent) for path in sorted(folder.glob(f"*/{ADDRESS}")) if PLACE.fullmatch(path.parent.name)]
    if not 0 < len(places) <= MOST_RUNS:
        raise SharingError(
            f"{folder} holds {len(places)} runs, a listener serves 1 to {MOST_RUNS}; make one with"
            f" `shoal pool init CONFIG --dir {folder}/NAME --url http://HOST:PORT/runs/NAME`"
        )
    front, taken = Front(), dict[str, str]()
    with _runs_named_in_the_log():
        identity = Identity.load_or_create(folder / KEY)
        for place in places:
            place.open(load, front, taken)
        speaking.set("")
        try:
            application = shared_application(places, front, identity)
            asyncio.run(_serve(places, application, identity.public, stop, (host, port, connections)))
        finally:
            for place in places:
                place.close()
            speaking.set("")
    if failed := [place.name for place in places if place.failed]:
        raise SharingError(f"these runs failed, the log says why: {', '.join(failed)}")


def shared_application(places: list[Place], front: Front, identity: Identity) -> web.Application:
    """All runs behind one front, each at its place, and the list of them, which `identity` signs."""
    root = front.attach(web.Application())
    root[IDENTITY] = identity
    attach_board(root, front, identity, lambda: [place.listed() for place in places])

    async def health(request: web.Request) -> web.Response:
        served = [place.name for place in places if not place.why]
        return web.json_response({"runs": served, "protocol": VERSION}, status=200 if served else 503)

    root.add_routes([web.get("/healthz", front.open_to_all(health))])
    for place in places:
        root.add_subapp(f"/runs/{place.name}", place.application())
    return root


async def _serve(
    places: list[Place], application: web.Application, key: str, stop: threading.Event, where: tuple[str, int, int]
) -> None:
    async with listening(application, *where) as listens_at:
        served = [place.name for place in places if not place.why]
        log.info("listening at %s, key %s, runs: %s", listens_at, key, ", ".join(served) or "none")
        await asyncio.gather(*(place.live(stop) for place in places))  # none of them raises


def _check(config: Config, address: Address, name: str, taken: dict[str, str]) -> None:
    """Raise SharingError unless this run can be served at its place, beside those that are served already."""
    if split_url(address.url)[1] != name:
        raise SharingError(f"its URL is {address.url}, and its folder is served at /runs/{name}: the two must agree")
    if address.run in taken:
        raise SharingError(f"it has the id and the key of {taken[address.run]}: a copy is not a second run")
    if config.coordinator.database:
        raise SharingError("it keeps its state in PostgreSQL: start it alone, with `shoal coordinator --dir`")
    if config.run.tracker in PROCESS_WIDE:
        raise SharingError(f"{config.run.tracker} knows one run in a process: start it alone, or choose tensorboard")


@contextmanager
def _runs_named_in_the_log() -> Iterator[None]:
    """The place stands before each line of the log that is about one run."""
    before = logging.getLogRecordFactory()

    def named(*arguments: object, **more: object) -> logging.LogRecord:
        record = before(*arguments, **more)
        if (place := speaking.get()) and record.name.startswith("shoal."):
            record.msg = f"{place}: {record.msg}"
        return record

    logging.setLogRecordFactory(named)
    try:
        yield
    finally:
        logging.setLogRecordFactory(before)
