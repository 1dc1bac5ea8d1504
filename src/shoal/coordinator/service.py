"""The coordinator as a process: listens, answers until told to stop; and the invites its operator makes.

Called by `shoal coordinator` and `shoal invite`. Its folder holds its key, databases and the store; `coordinator.json` there
says where it listens, for `shoal invite`. It is the one owner of the run's metrics: it writes their files and feeds the
tracker.
"""

import asyncio
import json
import logging
import threading
import time
from pathlib import Path

from aiohttp import web

from shoal.config import Config
from shoal.coordinator.routes import Coordinator
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite, InviteError, make_invite
from shoal.protocol.messages import Role, Status
from shoal.tracking.record import Record
from shoal.tracking.report import CURVE, SUMMARY, write_report
from shoal.tracking.trackers import open_tracker

POLL_S = 0.1
RECORD_S = 2.0
log = logging.getLogger(__name__)

KEY, ADDRESS = "identity.pem", "coordinator.json"


def serve_forever(
    config: Config,
    run: str,
    folder: Path,
    port: int,
    stop: threading.Event,
    *,
    record_to: Path | None = None,
    reports: bool = True,
) -> None:
    """Serve until `stop`, and keep the run's metrics in `record_to` (default: `folder`).

    `reports`: write summary and picture there too when the run has finished.
    Raises OSError where the port is taken, TrackerError where the tracker does not start.
    """
    identity = Identity.load_or_create(folder / KEY)
    coordinator = Coordinator(config, run, identity, folder)
    record = Record(record_to or folder, coordinator.pool.notices.append)
    record.tracker = open_tracker(record_to.name if record_to else run, record.folder, config)
    _catch_up(record, coordinator)
    try:
        asyncio.run(_serve(coordinator, folder, port, stop, record, reports))
    finally:
        _catch_up(record, coordinator)
        record.close()


async def _serve(
    coordinator: Coordinator, folder: Path, port: int, stop: threading.Event, record: Record, reports: bool
) -> None:
    host = coordinator.config.coordinator.host
    runner = web.AppRunner(coordinator.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound = int(runner.addresses[0][1])
        address = {"url": f"http://{host}:{bound}", "run": coordinator.run}
        (folder / ADDRESS).write_text(json.dumps(address))
        log.info("listening at %s for run %s", address["url"], coordinator.run)
        recorded_s = 0.0
        while not stop.is_set():
            await asyncio.sleep(POLL_S)
            if time.monotonic() - recorded_s >= RECORD_S:
                news = coordinator.pool.history.after(record.history.cursor)
                # In a thread: a tracker may wait for its own server, and members must not.
                await asyncio.to_thread(record.take, news)
                recorded_s = time.monotonic()
                if reports and (status := coordinator.pool.status()).state == "finished":
                    _catch_up(record, coordinator)
                    await asyncio.to_thread(_report, coordinator.config, status, record)
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


def invite_from(folder: Path, role: Role, name: str, url: str | None, days: float) -> Invite:
    """An invite by the coordinator whose folder this is."""
    try:
        address = json.loads((folder / ADDRESS).read_text())
    except (OSError, ValueError) as error:
        raise InviteError(
            f"{folder} is no coordinator's folder; start `shoal coordinator --dir {folder}` first"
        ) from error
    return make_invite(
        Identity.load(folder / KEY),
        url=url or address["url"],
        run=address["run"],
        role=role,
        name=name,
        expires_s=int(time.time() + days * 86_400),
    )
