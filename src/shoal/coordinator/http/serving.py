"""The coordinator as a process that serves one run: opened from its folder, kept on record while it is served, then sealed.

Its folder holds its key, databases and the store, and its URL in `coordinator.json`, for `shoal invite` and `shoal status`.
`GET /runs` is the signed list of a listener's runs, for machines that look for one. `sharing` serves several runs at one
listener instead.
Invariants: a `ServedRun` is the one owner of the run's metrics: it writes their files and feeds the tracker. It shares
nothing with another run of the same process. The list says what each run says of itself now, and has its open invite only
while that is valid.
"""

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from shoal.config import Config
from shoal.coordinator.database import record_start, seal
from shoal.coordinator.http.reports import Costly
from shoal.coordinator.http.routes import Coordinator
from shoal.coordinator.pool import TABLE_NAMES
from shoal.coordinator.state.folder import KEY
from shoal.protocol.address import Address
from shoal.protocol.discovery import DOMAIN
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.invite import Invite, InviteError, open_payload
from shoal.protocol.messages import VERSION, ClosedRun, RunList, RunOffer, Status
from shoal.protocol.server import Front, listen
from shoal.shardcast.server import url_of
from shoal.tracking.record import Record
from shoal.tracking.report import CURVE, SUMMARY, write_report
from shoal.tracking.trackers import open_tracker

if TYPE_CHECKING:
    from shoal.coordinator.state.postgres import Lead

POLL_S = 0.1
RECORD_S = 2.0
OPEN_INVITE = "open.invite"  # in a coordinator's folder: what `shoal invite --open --publish` wrote

log = logging.getLogger(__name__)


class ServedRun:
    def __init__(
        self,
        config: Config,
        run: str,
        folder: Path,
        *,
        front: Front | None = None,
        lead: "Lead | None" = None,
        record_to: Path | None = None,
        reports: bool = True,
    ) -> None:
        """Open the run. Its metrics are kept in `record_to` (default: `folder`). `front`: of the listener.

        `reports`: when the run has finished, write summary and picture there too. Raises TrackerError, PoolError,
        LedgerError, and what the database raises.
        """
        identity = Identity.load_or_create(folder / KEY)
        self.folder = folder
        self.coordinator = Coordinator(config, run, identity, folder, lead=lead, front=front)
        self.lead = lead
        self.reports = reports
        self.record = Record(record_to or folder, self.coordinator.pool.notices.append)
        self.record.tracker = open_tracker(record_to.name if record_to else run, self.record.folder, config)
        self._catch_up()
        record_start(self.coordinator.pool.db, run, identity.public, config)

    async def live(self, stop: threading.Event) -> None:
        """Keep the record until `stop`. Raises what ends this run: DatabaseLostError, OSError of a full disk."""
        settlement = self.coordinator.settlement
        settling = asyncio.create_task(settlement.run()) if settlement else None
        recorded_s = 0.0
        try:
            while not stop.is_set():
                await asyncio.sleep(POLL_S)
                if settling and settling.done():
                    settling.result()  # raises what ended it
                if self.lead:
                    self.lead.live_on()
                if time.monotonic() - recorded_s >= RECORD_S:
                    await self._take_record()
                    recorded_s = time.monotonic()
        finally:
            if settling:
                settling.cancel()

    def close(self) -> None:
        """The run's last words, once nobody is answered any more. Raises OSError, DatabaseFullError of a full disk."""
        try:
            if self.lead is None or not self.lead.is_lost:
                if self.coordinator.settlement:
                    self.coordinator.settlement.finish()
                self._catch_up()
                if self._report_is_due():  # it was stopped right after the end
                    self._report(self.coordinator.status())
                seal(self.coordinator.pool.db, TABLE_NAMES)
        finally:
            self.record.close()

    async def _take_record(self) -> None:
        """In a thread: a tracker may wait for its own server, and members must not."""
        pool, record = self.coordinator.pool, self.record
        await asyncio.to_thread(record.take, pool.db.history.after(record.history.cursor))
        if self._report_is_due():
            self._catch_up()
            await asyncio.to_thread(self._report, self.coordinator.status())

    def _report_is_due(self) -> bool:
        return self.reports and self.coordinator.pool.db.is_finished(self.coordinator.config.run.steps)

    def _report(self, status: Status) -> None:
        """Write the finished run's summary and picture, unless they are there from an earlier start."""
        self.reports = False
        record, config = self.record, self.coordinator.config
        path = record.folder / SUMMARY
        if path.exists() and json.loads(path.read_text())["steps"] >= status.trained:
            return
        wall_s = status.now_s - status.started_s
        summary = write_report(record.folder, config=config, status=status, history=record.history, wall_s=wall_s)
        steps, place = summary["steps"], record.folder
        log.info("the run has finished its %d steps; %s and %s are in %s", steps, SUMMARY, CURVE, place)

    def _catch_up(self) -> None:
        while self.record.take(self.coordinator.pool.db.history.after(self.record.history.cursor)):
            pass


def serve_forever(
    config: Config,
    run: str,
    folder: Path,
    port: int,
    stop: threading.Event,
    *,
    record_to: Path | None = None,
    url: str = "",
    reports: bool = True,
) -> None:
    """Serve one run until `stop`. With `coordinator.database`, stand by until no other coordinator leads.

    `url` is how nodes reach it (default: where it listens). The others as in `ServedRun`. Raises OSError if the port is
    taken, TrackerError if the tracker does not start, DatabaseLostError.
    """
    lead = None
    if config.coordinator.database:
        from shoal.coordinator.state.postgres import stand_by

        lead = stand_by(config.coordinator.database, stop)
        if lead is None:
            return
    served = ServedRun(config, run, folder, lead=lead, record_to=record_to, reports=reports)
    try:
        asyncio.run(_serve(served, port, stop, url))
    finally:
        served.close()


async def _serve(served: ServedRun, port: int, stop: threading.Event, url: str) -> None:
    coordinator, section = served.coordinator, served.coordinator.config.coordinator
    application = coordinator.app()
    address = Address(url=url, run=coordinator.run)
    attach_board(
        application,
        coordinator.front,
        coordinator.identity,
        lambda: [offer(coordinator, served.folder, "", address.url)],
    )
    async with listening(application, section.host, port, section.connections) as listens_at:
        address = Address(url=url or listens_at, run=coordinator.run)
        address.write(served.folder)
        log.info("run %s: listening at %s", coordinator.run, address.url)
        await served.live(stop)


@asynccontextmanager
async def listening(application: web.Application, host: str, port: int, per_address: int) -> AsyncIterator[str]:
    """Serve the application inside the block, with `per_address` connections from one address. Yields the URL.

    Raises OSError if the port is taken.
    """
    runner, bound = await listen(application, host, port, per_address=per_address)
    try:
        yield url_of(host, bound)
    finally:
        await runner.cleanup()


def attach_board(
    application: web.Application, front: Front, identity: Identity, listed: Callable[[], list[RunOffer | ClosedRun]]
) -> None:
    """Give the application the route. `identity` signs the list."""

    def make() -> str:
        found = listed()
        runs = RunList(
            protocol=VERSION,
            runs=[one for one in found if isinstance(one, RunOffer)],
            closed=[one for one in found if isinstance(one, ClosedRun)],
        )
        return Signed.make(identity, runs.model_dump_json(), domain=DOMAIN).model_dump_json()

    board = Costly(make)

    async def respond(request: web.Request) -> web.Response:
        return web.Response(body=board.get(), content_type="application/json", charset="utf-8")

    application.add_routes([web.get("/runs", front.open_to_all(respond))])


def offer(coordinator: Coordinator, folder: Path, place: str, url: str) -> RunOffer:
    """What this run says of itself. Raises InviteError if the published invite is not its own."""
    config, pool = coordinator.config, coordinator.pool
    workers, places = pool.members.count_workers(), config.requirements.places
    return RunOffer(
        place=place,
        run=coordinator.run,
        key=coordinator.identity.public,
        url=url,
        model=config.model.name[:200],
        state="finished" if pool.db.is_finished(config.run.steps) else "running",
        step=min(pool.db.open_step(), config.run.steps),
        steps=config.run.steps,
        workers=workers,
        places_free=max(places - workers, 0) if places else None,
        requirements=config.requirements.model_dump(),
        invite=_open_invite(coordinator, folder),
    )


def _open_invite(coordinator: Coordinator, folder: Path) -> str:
    """The published invite, "" if there is none or it has expired."""
    path = folder / OPEN_INVITE
    if not path.exists():
        return ""
    invite = Invite.decode(path.read_text())
    payload = open_payload(invite.signed.model_dump_json(), coordinator.identity.public, coordinator.run)
    if not payload.open:
        raise InviteError(f"{path} is not an open invite; remove it, or make one with `shoal invite --open --publish`")
    return invite.encode() if time.time() < payload.expires_s else ""
