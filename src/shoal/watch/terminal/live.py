"""The view of a running run: a screen in a terminal, lines anywhere else. The key `s` switches to sample completions.

Invariants: nothing is drawn between two updates, so no thread is needed. On exit the terminal is as it was; where standard
input is not a terminal, or belongs to another process in the foreground, nothing is changed and no key is ever pressed. A
coordinator that went away is waited for, up to a deadline.
"""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.segment import Segment
from rich.text import Text

from shoal.errors import printable
from shoal.protocol.history import PoolWatch, RunHistory, Status, UnreachableError, WorkerSample
from shoal.watch.figures import Pace, clean, number
from shoal.watch.terminal.events import Events
from shoal.watch.terminal.screen import render

HINT = "s: sample completions"
MOST = 20  # samples on a screen
POLL_S = 1.0
PATIENCE_S = 120.0  # a coordinator that restarts is back sooner


class Terminal(Console):
    """Every console of Shoal: what it prints holds the control characters of its own styles, and no others."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class LiveView:
    """`update` redraws the screen in a terminal, and prints what is new elsewhere."""

    def __init__(self, console: Console, keys: "Keys | None" = None) -> None:
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


@dataclass(frozen=True)
class SampleScreen:
    """The newest completions, newest first, as many as the console has room for."""

    history: RunHistory

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_height if console.is_terminal else 10_000
        title = Text("newest sample completions   s: back to the run", style="dim")
        panels: list[Panel] = []
        room -= 1
        for sample in reversed(self.history.samples[-MOST:]):
            panel = _sample_panel(sample)
            room -= len(console.render_lines(panel, options.update(height=None), pad=False))
            if room < 0 and panels:
                break
            panels.append(panel)
        rest = [] if panels else [Text("none yet: validators send one per accepted group")]
        yield from console.render(Group(title, *panels, *rest), options)


def _sample_panel(sample: WorkerSample) -> Panel:
    title = f"{sample.worker}  version {sample.policy_version}  reward {number(sample.reward)}  {sample.tokens} tokens"
    content = Group(Text(_lines(sample.prompt), style="dim"), Text(_lines(sample.completion)))
    return Panel(content, title=clean(title), title_align="left", border_style="dim", padding=(0, 1))


def _lines(text: str) -> str:
    return "\n".join(clean(line) for line in text.splitlines())


class Keys:
    """`stream`: the terminal, standard input by default."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdin
        self._before: list[Any] | None = None  # the terminal's settings, while it is in cbreak mode

    @property
    def works(self) -> bool:
        return self._before is not None

    def __enter__(self) -> Self:
        if self._stream.isatty() and _in_foreground(self._stream.fileno()):
            self._before = termios.tcgetattr(self._stream)
            tty.setcbreak(self._stream, termios.TCSANOW)  # keys come one by one and unechoed; Ctrl-C still interrupts
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self._stream, termios.TCSANOW, self._before)
            self._before = None

    def pressed(self) -> str:
        """All keys pressed since the last call, in order."""
        if self._before is None or not select.select([self._stream], [], [], 0)[0]:
            return ""
        return os.read(self._stream.fileno(), 1024).decode(errors="replace")


def _in_foreground(fd: int) -> bool:
    """Whether this process may change the terminal: a background process that tries is stopped by the system."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # it is not the controlling terminal: no such rule
        return True
