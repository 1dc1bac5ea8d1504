"""How far a long command is: a bar with the time left in a terminal, a line every ten seconds anywhere else.

Invariant: the time left counts only what this process did. The bar of `shoal fetch` is on standard error; paths of fetched
versions go to standard output.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from shoal import shardcast
from shoal.watch.figures import duration
from shoal.watch.terminal.live import Terminal

EVERY_S = 10.0


class CommandProgress:
    """Call it with how many are done, the first time with how many were done before."""

    def __init__(self, console: Console, what: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.what, self.total, self.clock = console, what, total, clock
        self.done = 0
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(escape(what), total=total)
        self._begun: tuple[int, float] | None = None
        self._said_s = -EVERY_S

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def __call__(self, done: int) -> None:
        now_s, self.done = self.clock(), done
        if self._begun is None:
            self._begun = (done, now_s)
            self.bar.reset(self.task, completed=done, total=self.total)
        self.bar.update(self.task, completed=done)
        if not self.console.is_terminal and (now_s - self._said_s >= EVERY_S or done == self.total):
            self._said_s = now_s
            self.console.print(self._line(done, now_s), soft_wrap=True, highlight=False, markup=False)

    def _line(self, done: int, now_s: float) -> str:
        assert self._begun is not None
        before, begun_s = self._begun
        line = f"{self.what}: {done} of {self.total}"
        if done == before or done == self.total:
            return line
        return f"{line}, ETA {duration((self.total - done) * (now_s - begun_s) / (done - before))}"


class FetchBar:
    """Bytes and speed of the running download, on standard error: standard output is for paths."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self.bar = Bar(*columns, TimeRemainingColumn(), console=Terminal(stderr=True), redirect_stdout=False)
        self.task = self.bar.add_task("", total=None)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, progress: shardcast.Progress) -> None:
        done, total = progress.transferred_bytes + progress.reused_bytes, progress.total_bytes
        self.bar.update(self.task, description=progress.doing, total=total or None, completed=min(done, total or 0))
