"""The view of one run while it goes on: a screen in a terminal, lines anywhere else.

Invariant: nothing is drawn between two statuses, so no thread is needed. Called by `shoal run`.
"""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shoal.protocol.history import RunHistory
from shoal.protocol.messages import Status
from shoal.view.events import Events
from shoal.view.figures import clean
from shoal.view.pace import Pace
from shoal.view.screen import render


class LiveView:
    """The view of one run: `update` redraws the screen in a terminal, and prints what is new elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._pace = Pace()
        self._events = Events()
        # No refresh thread: nothing changes between two statuses.
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

    def update(self, status: Status, history: RunHistory) -> None:
        self._pace.add(status)
        if self._live is not None:
            self._live.update(render(status, history, self._pace), refresh=True)
        else:
            for line in self._events.new(status, history):
                self.log(line)

    def log(self, message: str) -> None:
        """Print a line, above the screen if there is one."""
        line = Text("\n").join(Text(clean(part)) for part in message.splitlines())
        self.console.print(line, soft_wrap=self._live is None)
