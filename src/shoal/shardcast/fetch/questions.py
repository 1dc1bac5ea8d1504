"""One question to several servers: a list or a manifest, to few of them at first, to another one when one is silent.

Invariant: every server that was asked has an answer or a reason. Called by `sources`, which says in which order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shoal.shardcast.fetch.errors import NotHeld, SourceError
from shoal.shardcast.fetch.source import Source

T = TypeVar("T")
Question = Callable[[Source], Awaitable[T]]
OnFailure = Callable[[SourceError], None]

SILENCE = 0.9  # of hedge_s without an answer counts as silence
NOTHING_YET = 10  # times hedge_s: how long the rest may take after others answered that they have nothing


async def ask_few(
    waiting: list[Source], question: Question[T], enough: int, *, hedge_s: float, on_failure: OnFailure
) -> tuple[dict[Source, T], dict[str, str]]:
    """Asks `enough` servers, in this order, and the next one each time one fails, has nothing or is silent for `hedge_s`.

    Returns the answers, and for each other URL that was asked the reason.
    """
    asked: dict[asyncio.Task[T], tuple[Source, float]] = {}
    answers: dict[Source, T] = {}
    reasons: dict[str, str] = {}
    more = enough  # how many to ask now
    pending: set[asyncio.Task[T]] = set()
    try:
        while True:
            for source in waiting[:more]:
                task = asyncio.create_task(_answer(question, source))
                asked[task] = source, loop_time()
                pending.add(task)
            waiting = waiting[more:]
            given = sum(answer is not None for answer in answers.values())
            if given >= enough or not pending:
                break
            if waiting or given:
                timeout_s: float | None = hedge_s
            else:  # some may have answered that they have nothing: the rest, who may have it, get longer
                timeout_s = NOTHING_YET * hedge_s if answers else None
            done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done and (given or not waiting):
                break
            more = 0 if done else 1
            for task in done:
                source, asked_s = asked[task]
                try:
                    answers[source] = task.result()
                    more += answers[source] is None
                except SourceError as error:
                    reasons[source.url] = error.reason
                    on_failure(error)
                    more += 1
                    if not isinstance(error, NotHeld):
                        continue
                source.standing.answered(loop_time() - asked_s)
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    for source, asked_s in (asked[task] for task in pending):
        reasons[source.url] = "no answer in time, others answered"
        if loop_time() - asked_s >= SILENCE * hedge_s:
            source.standing.unanswered()
    return answers, reasons


async def _answer(question: Callable[[Source], Awaitable[T]], source: Source) -> T:
    return await question(source)


def loop_time() -> float:
    """The event loop's time, which is time.monotonic() unless a test replaces the loop."""
    return asyncio.get_running_loop().time()
