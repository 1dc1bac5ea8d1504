"""Jobs of other threads run in one; nobody waits for ever."""

import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest

from shoal.worker.loop import OneThread


def compute(home: OneThread, asking: "Future[int]") -> None:
    asking.add_done_callback(home.wake)
    home.compute_until(asking, 30)
    assert asking.done()


def test_jobs_of_other_threads_run_in_its_own() -> None:
    home = OneThread()
    with ThreadPoolExecutor(1) as threads, home:
        asking = threads.submit(lambda: home(threading.get_ident))
        compute(home, asking)
    assert asking.result() == threading.get_ident()
    assert home(threading.get_ident) == threading.get_ident(), "its own jobs need no turn"


def test_what_fails_is_raised_where_it_was_asked() -> None:
    home = OneThread()
    with ThreadPoolExecutor(1) as threads, home:
        asking = threads.submit(lambda: home(lambda: 1 // 0))
        compute(home, asking)
    with pytest.raises(ZeroDivisionError):
        asking.result()


def test_a_turn_ends_with_its_time() -> None:
    with OneThread() as home:
        home.compute_until(Future(), 0.01)


def test_whoever_asks_too_late_is_refused() -> None:
    home, asked = OneThread(), threading.Event()

    def ask() -> int:
        asked.set()
        return home(lambda: 1)

    with ThreadPoolExecutor(1) as threads:
        with home:
            waiting = threads.submit(ask)
            asked.wait(30)
        with pytest.raises(CancelledError):
            waiting.result(30)
        with pytest.raises(CancelledError):
            threads.submit(ask).result(30)
