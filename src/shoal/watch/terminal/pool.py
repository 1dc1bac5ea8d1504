"""`shoal pool status`: the view of any pool, once or until its run ends. `wall_s`: what the run has taken, where measured.

Invariant: a coordinator that went away is waited for, up to a deadline. Called by `cli`.
"""

import time
from collections.abc import Callable

from rich.console import Console

from shoal.protocol.watch import PoolWatch, UnreachableError
from shoal.watch.terminal.live import LiveView
from shoal.watch.terminal.screen import render

POLL_S = 1.0
PATIENCE_S = 120.0  # a coordinator that restarts is back sooner


def unmeasured() -> float | None:
    """Only the coordinator's start is known."""
    return None


def show(pool: PoolWatch, console: Console, wall_s: Callable[[], float | None] = unmeasured) -> None:
    """The state now. Raises UnreachableError."""
    status = pool.look()
    console.print(render(status, pool.history, wall_s=wall_s()))


def watch(
    pool: PoolWatch,
    console: Console,
    wall_s: Callable[[], float | None] = unmeasured,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """The state until the run has finished. Raises UnreachableError, at once if the first look fails."""
    status, seen_s, away = pool.look(), clock(), False
    with LiveView(console) as view:
        view.update(status, pool.history, wall_s())
        while status.state != "finished":
            sleep(POLL_S)
            try:
                status, seen_s, away = pool.look(), clock(), False
            except UnreachableError as error:
                if clock() - seen_s > PATIENCE_S:
                    raise
                if not away:
                    view.log(str(error))
                away = True
                continue
            view.update(status, pool.history, wall_s())
