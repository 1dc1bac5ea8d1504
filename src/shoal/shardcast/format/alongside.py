"""Does something with each piece of data on a second thread, while the first one prepares the next piece.

Invariant: pieces are taken in order, one at a time, and at most one waits. When the block ends, all are done. What the
second thread raises, the next call or the end of the block raises.
Called by the origin and the client, which hash what they read or write. Hashing releases the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def alongside(act: Callable[[T], None]) -> Iterator[Callable[[T], None]]:
    """Gives a function that passes its argument to `act`. The caller must not change that argument afterwards."""
    with ThreadPoolExecutor(1) as thread:
        running: list[Future[None]] = []

        def call(value: T) -> None:
            while running:
                running.pop().result()
            running.append(thread.submit(act, value))

        yield call
        while running:
            running.pop().result()
