"""Everything that computes, in one thread, whichever thread asks for it.

OpenMP keeps a team of threads for each thread that computes. A second team slows both down: GNU's OpenMP puts waiting
threads to sleep sooner when there are more of them than cores. With two threads on two cores, a worker that decoded in
another thread than the one that had loaded the weights was a third slower.

Invariant: jobs run one after another, in the thread that made this. Called by the worker's loop, for its engine and proofs.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, Self, TypeVar

T = TypeVar("T")
Compute = Callable[[Callable[[], Any]], Any]  # runs a job somewhere, and returns its result


def here(job: Callable[[], T]) -> T:
    """In the thread that asks."""
    return job()


class OneThread:
    """Within `with`, other threads may ask. At its end whoever still waits, or asks later, gets CancelledError."""

    def __init__(self) -> None:
        self._home = threading.get_ident()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._open = False

    def __enter__(self) -> Self:
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._refuse()

    def __call__(self, job: Callable[[], T]) -> T:
        """The job's result."""
        if threading.get_ident() == self._home:
            return job()
        done: Future[T] = Future()
        self._jobs.put((job, done))
        if not self._open:
            self._refuse()
        return done.result()

    def compute_until(self, done: Future[Any], most_s: float) -> None:
        """Run what other threads ask for, until this is done or so much time has passed. `wake` has to be its callback."""
        end_s = time.monotonic() + most_s
        while not done.done() and (left_s := end_s - time.monotonic()) > 0:
            try:
                job, asked = self._jobs.get(timeout=left_s)
            except queue.Empty:
                return
            try:
                asked.set_result(job())
            except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
                asked.set_exception(error)

    def wake(self, _: object = None) -> None:
        """Let `compute_until` look again."""
        self._jobs.put((lambda: None, Future()))

    def _refuse(self) -> None:
        while True:
            try:
                _, asked = self._jobs.get_nowait()
            except queue.Empty:
                return
            asked.set_exception(CancelledError("the thread that computes has ended"))
