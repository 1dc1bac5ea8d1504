"""`shoal pool status` prints the state once, or shows the live view until the run finishes."""

import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from shoal.protocol.history import History, UnreachableError
from shoal.watch.run import PoolRun
from shoal.watch.summary import Leg, write_legs
from shoal.watch.terminal.live import PATIENCE_S, show, watch
from tests.watch.support import status

AWAY = None
RUNNING = status(step=3).status
FINISHED = status(step=30, state="finished").status


def pool(*responses: object, legs: Path | None = None) -> PoolRun:
    """Return a run whose coordinator gives these responses in turn. Where one is `AWAY`, it is unreachable."""
    states: Iterator[object] = iter(responses)

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/history":
            return httpx.Response(200, text=History(cursor=0, metrics=[], evaluations=[], samples=[]).model_dump_json())
        state = next(states)
        if state is AWAY:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(200, text=state.model_dump_json())  # type: ignore[attr-defined]

    return PoolRun("http://pool:1", httpx.Client(transport=httpx.MockTransport(respond)), legs)


def console() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=False)


def output(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


class Clock:
    """A clock that advances only by `sleep`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s

    def __call__(self) -> float:
        return self.now_s


def test_show_prints_the_state() -> None:
    screen = console()
    show(pool(RUNNING), screen)
    assert "sums" in output(screen) and max(map(len, output(screen).splitlines())) <= 80


def test_show_prints_the_measured_time(tmp_path: Path) -> None:
    screen = console()
    write_legs(tmp_path, [Leg(wall_s=63.0)])
    show(pool(RUNNING, legs=tmp_path), screen)
    assert "elapsed 1m 03s" in output(screen)


def test_watch_ends_when_the_run_finishes() -> None:
    clock = Clock()
    watch(pool(RUNNING, RUNNING, FINISHED), console(), sleep=clock.sleep, clock=clock)
    assert clock.now_s == 2.0
    watch(pool(FINISHED), console(), sleep=clock.sleep, clock=clock)
    assert clock.now_s == 2.0


def test_watch_waits_for_a_restarting_coordinator_and_logs_that_once() -> None:
    screen, clock = console(), Clock()
    watch(pool(RUNNING, AWAY, AWAY, AWAY, RUNNING, FINISHED), screen, sleep=clock.sleep, clock=clock)
    assert output(screen).count("no coordinator answers at http://pool:1") == 1


def test_watch_ends_when_the_coordinator_stays_unreachable() -> None:
    clock = Clock()
    with pytest.raises(UnreachableError, match="http://pool:1"):
        watch(pool(RUNNING, *[AWAY] * 1000), console(), sleep=clock.sleep, clock=clock)
    assert PATIENCE_S <= clock.now_s <= PATIENCE_S + 2


def test_watch_does_not_wait_for_a_coordinator_that_never_responded() -> None:
    clock = Clock()
    with pytest.raises(UnreachableError, match="http://pool:1"):
        watch(pool(AWAY), console(), sleep=clock.sleep, clock=clock)
    assert clock.now_s == 0
