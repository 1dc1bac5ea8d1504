"""The coordinator as a process: listens and answers until it is stopped; and the invites that its operator makes.

Called by `shoal coordinator` and `shoal invite`. Its folder holds its key, databases and the store, and its URL in
`coordinator.json`, for `shoal invite` and `shoal status`. It is the one owner of the run's metrics: it writes their files
and feeds the tracker.
"""

import asyncio
import json
import logging
import threading
import time
from pathlib import Path

from aiohttp import web
from pydantic import ValidationError

from shoal.config import Config
from shoal.coordinator.http.routes import Coordinator
from shoal.coordinator.state.seal import seal, start
from shoal.protocol.address import FILE as ADDRESS
from shoal.protocol.address import Address, AddressError
from shoal.protocol.identity import Identity, IdentityError
from shoal.protocol.invite import Invite, InviteError, make_invite
from shoal.protocol.messages import Role, Status
from shoal.shardcast.serve.connections import LISTENER, PATIENCE, Listener
from shoal.shardcast.serve.log import LOG
from shoal.shardcast.serve.server import url_of
from shoal.tracking.record import Record
from shoal.tracking.report import CURVE, SUMMARY, write_report
from shoal.tracking.trackers import open_tracker

POLL_S = 0.1
RECORD_S = 2.0
MAX_CONNECTIONS = 4096  # fewer if the process may not open twice as many files
BACKLOG = 128  # connections that wait to be accepted; asyncio accepts as many before it does anything else
LINGER_S = 30.0  # how long the rest of a refused body is read and discarded, so that its sender sees the answer
READ_BUFFER_BYTES = 64 << 10  # of each connection; up to twice as much is held
KEY = "identity.pem"
__all__ = ["ADDRESS", "KEY", "invite_from", "serve_forever"]

log = logging.getLogger(__name__)


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
    """Serve until `stop`, and keep the run's metrics in `record_to` (default: `folder`). With `coordinator.database`, stand
    by until no other coordinator leads.

    `url` is how nodes reach it (default: where it listens). `reports`: when the run has finished, write summary and picture
    there too. Raises OSError if the port is taken, TrackerError if the tracker does not start, DatabaseLostError.
    """
    identity = Identity.load_or_create(folder / KEY)
    lead = None
    if config.coordinator.database:
        from shoal.coordinator.state.lead import stand_by

        lead = stand_by(config.coordinator.database, stop)
        if lead is None:
            return
    coordinator = Coordinator(config, run, identity, folder, lead=lead)
    record = Record(record_to or folder, coordinator.pool.notices.append)
    record.tracker = open_tracker(record_to.name if record_to else run, record.folder, config)
    _catch_up(record, coordinator)
    start(coordinator.pool.db, run, identity.public, config)
    try:
        asyncio.run(_serve(coordinator, folder, port, stop, record, url, reports=reports))
    finally:
        if lead is None or not lead.is_lost:
            if coordinator.settlement:
                coordinator.settlement.finish()
            _catch_up(record, coordinator)
            seal(coordinator.pool.db)
        record.close()


async def _serve(
    coordinator: Coordinator,
    folder: Path,
    port: int,
    stop: threading.Event,
    record: Record,
    url: str,
    *,
    reports: bool,
) -> None:
    section = coordinator.config.coordinator
    listener = Listener(section.host, port, PATIENCE, per_address=section.connections, total=MAX_CONNECTIONS)
    application = coordinator.app()
    application[LISTENER] = listener
    application.cleanup_ctx.append(listener.watching)
    runner = web.AppRunner(
        application,
        access_log=None,
        logger=LOG,
        shutdown_timeout=1.0,
        keepalive_timeout=PATIENCE.idle_s,
        lingering_time=LINGER_S,
        read_bufsize=READ_BUFFER_BYTES,
        auto_decompress=False,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        address = Address(url=url or url_of(section.host, int(listener.getsockname()[1])), run=coordinator.run)
        address.write(folder)
        log.info("run %s: listening at %s", coordinator.run, address.url)
        recorded_s = 0.0
        settling = asyncio.create_task(coordinator.settlement.run()) if coordinator.settlement else None
        while not stop.is_set():
            await asyncio.sleep(POLL_S)
            if settling and settling.done():
                settling.result()  # raises what ended it
            if coordinator.lead:
                coordinator.lead.live_on()
            if time.monotonic() - recorded_s >= RECORD_S:
                news = coordinator.pool.history.after(record.history.cursor)
                # In a thread: a tracker may wait for its own server, and members must not.
                await asyncio.to_thread(record.take, news)
                recorded_s = time.monotonic()
                if reports and coordinator.pool.db.is_finished(coordinator.config.run.steps):
                    _catch_up(record, coordinator)
                    await asyncio.to_thread(_report, coordinator.config, coordinator.pool.status(), record)
                    reports = False
    finally:
        await runner.cleanup()


def _report(config: Config, status: Status, record: Record) -> None:
    """Write the finished run's summary and picture, unless they are there from an earlier start."""
    path = record.folder / SUMMARY
    if path.exists() and json.loads(path.read_text())["steps"] >= status.trained:
        return
    wall_s = status.now_s - status.started_s
    summary = write_report(record.folder, config=config, status=status, history=record.history, wall_s=wall_s)
    log.info("the run has finished its %d steps; %s and %s are in %s", summary["steps"], SUMMARY, CURVE, record.folder)


def _catch_up(record: Record, coordinator: Coordinator) -> None:
    while record.take(coordinator.pool.history.after(record.history.cursor)):
        pass


def invite_from(folder: Path, role: Role, name: str, url: str | None, days: float, *, open: bool = False) -> Invite:
    """An invite by the coordinator that uses this folder; an `open` one is for strangers with stake. Raises InviteError."""
    try:
        address, identity = Address.read(folder), Identity.load(folder / KEY)
    except (AddressError, IdentityError) as error:
        raise InviteError(
            f"{folder} is not the folder of a coordinator; make one with `shoal pool init CONFIG --dir {folder} --url URL`"
        ) from error
    expires_s = int(time.time() + days * 86_400)
    try:
        return make_invite(
            identity, url=url or address.url, run=address.run, role=role, name=name, expires_s=expires_s, open=open
        )
    except ValidationError as error:
        if open and role != "worker":
            raise InviteError(f"an open invite is for workers, not for the role {role}") from error
        raise InviteError(f"{name[:60]!r} is not a node's name: use a to z, 0 to 9 and -, at most 40") from error
