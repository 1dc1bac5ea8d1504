"""`shoal pool status` of a sites' meeting: who takes part, with what loss, where its time goes and how much it sent.

What a meeting answers is open to all, and only shown.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import httpx
from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from shoal.protocol.calling import get
from shoal.protocol.history import UnreachableError
from shoal.watch.figures import SiteRow, clean
from shoal.watch.terminal.screen import sites_table

if TYPE_CHECKING:
    from shoal.diloco.messages import MeetingStatus, SiteStatus

POLL_S = 1.0
MOST_BYTES = 16 << 20  # of a state


def meeting_at(url: str, client: httpx.Client) -> MeetingStatus | None:
    """What the meeting at `url` says; None if no meeting answers there."""
    try:
        answer = get(client, f"{url}/v1/status", MOST_BYTES)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    if answer.status_code != 200 or b'"rounds"' not in answer.content:
        return None  # spares `shoal pool status` of a pool the import of torch
    from shoal.diloco.messages import MeetingStatus

    try:
        return MeetingStatus.model_validate_json(answer.content)
    except ValidationError:
        return None


def watch_meeting(url: str, status: MeetingStatus, client: httpx.Client, console: Console) -> None:
    """Show it until its last round is over, a new screen at each look or, in a log, a table a round.

    Raises UnreachableError.
    """
    shown = -1
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    with live or nullcontext():
        while True:
            if live:
                live.update(screen(status, console.width), refresh=True)
            elif status.round != shown:
                console.print(screen(status, console.width))
            shown = status.round
            if status.round >= status.rounds:
                return
            time.sleep(POLL_S)
            found = meeting_at(url, client)
            if found is None:
                raise UnreachableError(f"the meeting at {url} answers no more: see the log of `shoal meet`")
            status = found


def screen(status: MeetingStatus, width: int) -> RenderableType:
    over = status.round >= status.rounds
    missing = ", ".join(clean(name) for name in status.waiting_for)
    done = f"{status.round} of {status.rounds} rounds" + (f", waiting for {missing}" if missing and not over else "")
    rows = [_row(name, site) for name, site in status.sites.items()]
    return Group(Text(f"{clean(status.run)}  {done}"), sites_table(rows, width) if rows else Text("no site yet"))


def _row(name: str, site: SiteStatus) -> SiteRow:
    last = f"last counted in round {site.accepted + 1}" if site.accepted >= 0 else "never counted"
    state = "has offered" if site.offered else "training" if site.expected else f"away, {last}"
    told = site.figures.model_dump(exclude_none=True) if site.figures else {}
    return SiteRow(clean(name), state, site.expected, **told | {"sent_bytes": site.sent_bytes})
