"""`shoal pool status`: one look, or the view until the run has finished."""

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


def pool(*looks: object, legs: Path | None = None) -> PoolRun:
    """Each look finds the next of these; `AWAY`: nobody answers."""
    states: Iterator[object] = iter(looks)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/history":
            return httpx.Response(200, text=History(cursor=0, metrics=[], evaluations=[], samples=[]).model_dump_json())
        state = next(states)
        if state is AWAY:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(200, text=state.model_dump_json())  # type: ignore[attr-defined]

    return PoolRun("http://pool:1", httpx.Client(transport=httpx.MockTransport(answer)), legs)


def console() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=False)


def printed(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


class Clock:
    """Time that passes only while someone sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s

    def __call__(self) -> float:
        return self.now_s


def test_one_look_shows_the_state() -> None:
    screen = console()
    show(pool(RUNNING), screen)
    assert "sums" in printed(screen) and max(map(len, printed(screen).splitlines())) <= 80


def test_what_a_run_took_is_shown_where_it_was_measured(tmp_path: Path) -> None:
    screen = console()
    write_legs(tmp_path, [Leg(wall_s=63.0)])
    show(pool(RUNNING, legs=tmp_path), screen)
    assert "elapsed 1m 03s" in printed(screen)


def test_it_is_watched_until_the_run_has_finished() -> None:
    clock = Clock()
    watch(pool(RUNNING, RUNNING, FINISHED), console(), sleep=clock.sleep, clock=clock)
    assert clock.now_s == 2.0


def test_a_finished_run_is_shown_once() -> None:
    clock = Clock()
    watch(pool(FINISHED), console(), sleep=clock.sleep, clock=clock)
    assert clock.now_s == 0


def test_a_restart_of_the_coordinator_is_waited_for_and_said_once() -> None:
    screen, clock = console(), Clock()
    watch(pool(RUNNING, AWAY, AWAY, AWAY, RUNNING, FINISHED), screen, sleep=clock.sleep, clock=clock)
    assert printed(screen).count("no coordinator answers at http://pool:1") == 1


def test_a_coordinator_that_stays_away_ends_the_watch() -> None:
    clock = Clock()
    with pytest.raises(UnreachableError, match="http://pool:1"):
        watch(pool(RUNNING, *[AWAY] * 1000), console(), sleep=clock.sleep, clock=clock)
    assert PATIENCE_S <= clock.now_s <= PATIENCE_S + 2


def test_a_pool_that_never_answered_is_not_waited_for() -> None:
    clock = Clock()
    with pytest.raises(UnreachableError, match="http://pool:1"):
        watch(pool(AWAY), console(), sleep=clock.sleep, clock=clock)
    assert clock.now_s == 0
