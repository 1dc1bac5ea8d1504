"""The coordinator as a process: listens, answers until told to stop; and the invites its operator makes.

Called by `shoal coordinator` and `shoal invite`. Its folder holds its key, databases and the store; `coordinator.json` there
says where it listens, for `shoal invite`. It is the one owner of the run's metrics: it writes their files and feeds the
tracker.
"""

import asyncio
import json
import threading
import time
from pathlib import Path

from aiohttp import web

from shoal.config import Config
from shoal.coordinator.routes import Coordinator
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite, InviteError, make_invite
from shoal.protocol.messages import Role
from shoal.tracking.record import Record
from shoal.tracking.trackers import open_tracker

POLL_S = 0.1
RECORD_S = 2.0
KEY, ADDRESS = "identity.pem", "coordinator.json"


def serve_forever(
    config: Config, run: str, folder: Path, port: int, stop: threading.Event, *, record_to: Path | None = None
) -> None:
    """Serve until `stop`, and keep the run's metrics in `record_to` (default: `folder`).

    Raises OSError where the port is taken, TrackerError where the tracker does not start.
    """
    identity = Identity.load_or_create(folder / KEY)
    coordinator = Coordinator(config, run, identity, folder)
    record = Record(record_to or folder, coordinator.pool.notices.append)
    record.tracker = open_tracker(record_to.name if record_to else run, record.folder, config)
    _catch_up(record, coordinator)
    try:
        asyncio.run(_serve(coordinator, folder, port, stop, record))
    finally:
        _catch_up(record, coordinator)
        record.close()


async def _serve(coordinator: Coordinator, folder: Path, port: int, stop: threading.Event, record: Record) -> None:
    host = coordinator.config.coordinator.host
    runner = web.AppRunner(coordinator.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound = int(runner.addresses[0][1])
        address = {"url": f"http://{host}:{bound}", "run": coordinator.run}
        (folder / ADDRESS).write_text(json.dumps(address))
        recorded_s = 0.0
        while not stop.is_set():
            await asyncio.sleep(POLL_S)
            if time.monotonic() - recorded_s >= RECORD_S:
                news = coordinator.pool.history.after(record.history.cursor)
                # In a thread: a tracker may wait for its own server, and members must not.
                await asyncio.to_thread(record.take, news)
                recorded_s = time.monotonic()
    finally:
        await runner.cleanup()


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
