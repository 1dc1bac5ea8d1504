"""How far a long count has come: a bar with the time left in a terminal, a line now and then anywhere else.

Invariant: what was known before the start does not count towards the pace. Called by `evaluate`.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from shoal.view import duration

LINE_EVERY_S = 30.0


class Counting:
    """Use as a context manager; `add` what is done."""

    def __init__(
        self, console: Console, label: str, total: int, known: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console
        self.label = label
        self.total = total
        self.known = known
        self.at = self.said_at = known
        self.clock = clock
        self.started_s = self.said_s = clock()
        self.bar: Progress | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
            self.bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console)
            self.bar.add_task(self.label, total=self.total, completed=self.known)
            self.bar.start()
        elif self.known < self.total:
            self._say()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif self.said_at < self.at:
            self._say()

    def add(self, n: int) -> None:
        self.at += n
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.at)
        elif self.clock() - self.said_s >= LINE_EVERY_S:
            self._say()

    def _say(self) -> None:
        now_s = self.said_s = self.clock()
        self.said_at = self.at
        made = self.at - self.known
        left = (
            f", {duration((self.total - self.at) * (now_s - self.started_s) / made)} left"
            if made and self.at < self.total
            else ""
        )
        self.console.print(
            f"{self.label}: {self.at} of {self.total}{left}", markup=False, highlight=False, soft_wrap=True
        )
