"""How often open pages are told what is new."""

import asyncio
import itertools
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

    async def run() -> int:
        feed = Counting(cast(Run, None), [])
        feed._watching = 1
        looking = asyncio.create_task(feed._look_on())
        await asyncio.sleep(0.3)
        looking.cancel()
        return feed.looks

    with ThreadPoolExecutor(1) as thread:  # a browser's test leaves a loop running in this one
        assert thread.submit(asyncio.run, run()).result() == 1
