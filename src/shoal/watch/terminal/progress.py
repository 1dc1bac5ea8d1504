"""Progress of long commands: a bar for a download, and a line with the ETA every ten seconds for other commands.

Invariant: the ETA is extrapolated from this process's work alone. `shoal fetch` draws its bar on standard error and prints
the paths of fetched versions on standard output.
"""

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from shoal import shardcast
from shoal.watch.figures import duration
from shoal.watch.terminal.live import Terminal

EVERY_S = 10.0


class CommandProgress:
    """Report progress. Each call passes the number of items done; the first passes those that earlier processes did."""

    def __init__(self, console: Console, what: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.what, self.total, self.clock = console, what, total, clock
        self._start: tuple[int, float] | None = None
        self._printed_s = -EVERY_S

    def __call__(self, done: int) -> None:
        now_s = self.clock()
        before, start_s = self._start = self._start or (done, now_s)
        if now_s - self._printed_s < EVERY_S and done != self.total:
            return
        self._printed_s = now_s
        line = f"{self.what}: {done} of {self.total}"
        if done not in (before, self.total):
            line += f", ETA {duration((self.total - done) * (now_s - start_s) / (done - before))}"
        self.console.print(line, soft_wrap=True, highlight=False, markup=False)


class FetchBar:
    """Show bytes, speed and senders of the current download on standard error."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        ends = (TimeRemainingColumn(), TextColumn("{task.fields[senders]}"))
        self.bar = Bar(*columns, *ends, console=Terminal(stderr=True), redirect_stdout=False)
        self.task = self.bar.add_task("", total=None, senders="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, progress: shardcast.Progress) -> None:
        done, total = progress.transferred_bytes + progress.reused_bytes, progress.total_bytes
        senders = ", ".join(f"{url} {sent / 1e6:.1f} MB" for url, sent in list(progress.by_source.items())[:4])
        done = min(done, total or 0)
        self.bar.update(self.task, description=progress.doing, total=total or None, completed=done, senders=senders)
