"""The progress of `shoal fetch`: one bar on standard error. Paths of fetched versions go to standard output."""

from __future__ import annotations

import sys

from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from shoal.errors import printable
from shoal.shardcast import Progress
from shoal.watch.terminal.live import Terminal


class FetchBar:
    """Bytes, speed and senders of the running download."""

    def __init__(self) -> None:
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[sources]}"),
            console=Terminal(stderr=True),
        )
        self.task = self.bar.add_task("", total=None, sources="")

    def __enter__(self) -> FetchBar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, progress: Progress) -> None:
        sources = sorted(progress.by_source.items(), key=lambda item: -item[1])
        senders = ", ".join(f"{url} {size_bytes / 1e6:.1f} MB" for url, size_bytes in sources[:4])
        self.bar.update(
            self.task,
            description=progress.doing,
            total=progress.total_bytes or None,
            completed=min(progress.transferred_bytes + progress.reused_bytes, progress.total_bytes or 0),
            sources=senders,
        )

    def say(self, line: str) -> None:
        self.bar.refresh()
        sys.stdout.write(printable(line) + "\n")
        sys.stdout.flush()
