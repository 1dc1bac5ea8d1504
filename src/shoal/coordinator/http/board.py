"""`GET /runs`: the signed list of a listener's runs, for machines that look for one.

Invariant: the list says what each run says of itself now, and has its open invite only while that is valid. Making it costs
members little (`costly`). Called by `service` for one run and by `sharing` for several.
"""

import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from shoal.coordinator.http.costly import Costly
from shoal.coordinator.http.routes import Coordinator
from shoal.protocol.discovery import DOMAIN
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.invite import Invite, InviteError, open_payload
from shoal.protocol.messages import VERSION, ClosedRun, RunList, RunOffer
from shoal.protocol.server import Front

OPEN_INVITE = "open.invite"  # in a coordinator's folder: what `shoal invite --open --publish` wrote

Listed = Callable[[], list[RunOffer | ClosedRun]]


def attach_board(application: web.Application, front: Front, identity: Identity, listed: Listed) -> None:
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
