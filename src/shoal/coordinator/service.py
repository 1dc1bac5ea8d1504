"""The coordinator as a process: listens and answers until it is stopped; and the invites that its operator makes.

Called by `shoal coordinator` and `shoal invite`. Its folder holds its key, databases and the store, and its URL in
`coordinator.json`, for `shoal invite` and `shoal status`. `sharing` serves several runs at one listener instead.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from pydantic import ValidationError

from shoal.config import Config
from shoal.coordinator.http.board import attach_board, offer
from shoal.coordinator.served import KEY, ServedRun
from shoal.protocol.address import FILE as ADDRESS
from shoal.protocol.address import Address, AddressError
from shoal.protocol.identity import Identity, IdentityError
from shoal.protocol.invite import Invite, InviteError, make_invite
from shoal.protocol.messages import Role
from shoal.shardcast.serve.connections import LOG, PATIENCE, Listener, started
from shoal.shardcast.serve.server import url_of

MAX_CONNECTIONS = 4096  # fewer if the process may not open twice as many files
BACKLOG = 128  # connections that wait to be accepted; asyncio accepts as many before it does anything else
READ_BUFFER_BYTES = 64 << 10  # of each connection; up to twice as much is held
__all__ = ["ADDRESS", "KEY", "invite_from", "listening", "serve_forever"]

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
    """Serve one run until `stop`. With `coordinator.database`, stand by until no other coordinator leads.

    `url` is how nodes reach it (default: where it listens). The others as in `ServedRun`. Raises OSError if the port is
    taken, TrackerError if the tracker does not start, DatabaseLostError.
    """
    lead = None
    if config.coordinator.database:
        from shoal.coordinator.state.lead import stand_by

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
    listener = Listener(host, port, PATIENCE, per_address=per_address, total=MAX_CONNECTIONS)
    runner = await started(
        application,
        listener,
        backlog=BACKLOG,
        logger=LOG,
        lingering_time=0,  # `Front` reads what is left of a refused body
        read_bufsize=READ_BUFFER_BYTES,
        auto_decompress=False,
    )
    try:
        yield url_of(host, int(listener.getsockname()[1]))
    finally:
        await runner.cleanup()


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
