"""The live view of a run is a screen in a terminal, and log lines elsewhere.

Invariant: the view draws only in `update` and `log`, so it needs no thread. `watch` waits up to PATIENCE_S for an
unreachable coordinator.
The view takes no keyboard input. It shows no completions; the dashboard shows them under About.
"""

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from shoal.errors import printable
from shoal.protocol.history import RunHistory, Status, UnreachableError
from shoal.watch.figures import clean
from shoal.watch.run import Run
from shoal.watch.terminal.events import Events
from shoal.watch.terminal.screen import Screen

POLL_S = 1.0
PATIENCE_S = 120.0  # longer than a coordinator needs to restart


class Terminal(Console):
    """A console that prints no control characters except those of its own styles."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class LiveView:
    """Redraw the screen in a terminal; elsewhere print new events."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._events = Events()
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, status: Status, history: RunHistory, wall_s: float | None = None) -> None:
        """Show a status. `wall_s`: the run's time so far, or None for the time since its coordinator first started."""
        if self._live is not None:
            self._live.update(Screen(status, history, wall_s), refresh=True)
            return
        for line in self._events.new(status, history):
            self.log(line)

    def log(self, message: str) -> None:
        """Print a line, above the screen if there is one."""
        line = Text("\n").join(Text(clean(part)) for part in message.splitlines())
        self.console.print(line, soft_wrap=self._live is None)


def show(run: Run, console: Console) -> None:
    """Print the current state. Raise UnreachableError."""
    status = run.refresh()
    console.print(Screen(status, run.history, elapsed_s=run.wall_s(status)))


def watch(
    run: Run,
    console: Console,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Show the state until the run finishes.

    Raise UnreachableError if the coordinator does not respond for PATIENCE_S, or if the first request fails.
    """
    status, seen_s, away = run.refresh(), clock(), False
    with LiveView(console) as view:
        view.update(status, run.history, run.wall_s(status))
        while status.state != "finished":
            sleep(POLL_S)
            try:
                status, seen_s, away = run.refresh(), clock(), False
            except UnreachableError as error:
                if clock() - seen_s > PATIENCE_S:
                    raise
                if not away:
                    view.log(str(error))
                away = True
                continue
            view.update(status, run.history, run.wall_s(status))
