"""The view of a running run: a screen in a terminal, lines anywhere else. The key `s` switches to sample completions.

Invariant: nothing is drawn between two updates, so no thread is needed. Called by `shoal run` and `shoal pool status`.
"""

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from shoal.errors import printable
from shoal.protocol.history import RunHistory
from shoal.protocol.messages import Status
from shoal.watch.figures import clean
from shoal.watch.pace import Pace
from shoal.watch.terminal.events import Events
from shoal.watch.terminal.keys import Keys
from shoal.watch.terminal.samples import SampleScreen
from shoal.watch.terminal.screen import render

HINT = "s: sample completions"


class Terminal(Console):
    """Every console of Shoal: what it prints holds the control characters of its own styles, and no others."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class LiveView:
    """`update` redraws the screen in a terminal, and prints what is new elsewhere."""

    def __init__(self, console: Console, keys: Keys | None = None) -> None:
        self.console = console
        self._keys = keys or Keys()
        self._samples = False  # whether completions are shown in place of the run
        self._pace = Pace()
        self._events = Events()
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._keys.__enter__()
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._keys.__exit__(kind, error, trace)

    def update(self, status: Status, history: RunHistory, wall_s: float | None = None) -> None:
        """`wall_s`: what the run has taken, if it was measured; else since its coordinator first started."""
        self._pace.add(status)
        if self._live is None:
            for line in self._events.new(status, history):
                self.log(line)
            return
        if self._keys.pressed().count("s") % 2:
            self._samples = not self._samples
        hint = HINT if self._keys.works else ""
        screen = (
            SampleScreen(history) if self._samples else render(status, history, self._pace, hint=hint, wall_s=wall_s)
        )
        self._live.update(screen, refresh=True)

    def log(self, message: str) -> None:
        """Print a line, above the screen if there is one."""
        line = Text("\n").join(Text(clean(part)) for part in message.splitlines())
        self.console.print(line, soft_wrap=self._live is None)
