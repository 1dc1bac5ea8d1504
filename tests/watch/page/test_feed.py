"""How often open pages are told what is new."""

import asyncio
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from shoal.watch.page import feed as feed_module
from shoal.watch.page.feed import FAR_APART_S, LOOK_S, SHARE, Feed, rest_s
from shoal.watch.run import Run


def test_looking_and_telling_take_their_share_of_one_core() -> None:
    assert rest_s(0.0, 0.0) == 0.0
    for looked_s, told_s in ((0.05, 0.0), (0.0, 0.08), (0.03, 0.03)):
        assert looked_s + told_s == pytest.approx((LOOK_S + rest_s(looked_s, told_s)) * SHARE)
    assert LOOK_S + rest_s(0.01, 60.0) == FAR_APART_S  # pages that read slowly delay the others by so much at most
    assert LOOK_S + rest_s(1.0, 0.0) == pytest.approx(1.0 / SHARE)  # a look that takes long is never hurried


class Counting(Feed):
    """Of a run that says something new at each look."""

    looks = 0

    def refresh(self) -> bool:
        self.looks += 1
        return True


def test_pages_that_cost_much_are_told_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "LOOK_S", 0.001)
    clock_s = itertools.count(0.0, 1.0)
    monkeypatch.setattr(feed_module.time, "thread_time", lambda: next(clock_s))  # telling takes a second, each time

    assert looks(Counting) == 1


class Distant(Counting):
    """Of a coordinator that takes its time to answer."""

    def refresh(self) -> bool:
        time.sleep(0.05)
        return super().refresh()


def test_a_coordinator_that_answers_slowly_is_looked_at_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look was taken for work, so pages of a distant pool were told every ten seconds."""
    monkeypatch.setattr(feed_module, "LOOK_S", 0.02)
    assert looks(Distant) >= 3


def looks(kind: type[Counting], for_s: float = 0.6) -> int:
    """How often a feed with one open page looks."""

    async def run() -> int:
        feed = kind(cast(Run, None), [])
        feed._watching = 1
        looking = asyncio.create_task(feed._look_on())
        await asyncio.sleep(for_s)
        looking.cancel()
        return feed.looks

    with ThreadPoolExecutor(1) as thread:  # a browser's test leaves a loop running in this one
        return thread.submit(asyncio.run, run()).result()
