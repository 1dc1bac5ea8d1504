"""What is new in a run, to every open page at once.

Invariant: while nobody watches, nothing is read. While somebody does, the run is looked at once for all of them. Looking and
telling the pages take at most SHARE of one core, so that many open pages are told less often, down to every FAR_APART_S.
Each page gets every step and evaluation after the last one it has seen, in order (`Seen`).
Called by the server. One thread of its own reads the run.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self, TypeVar

from shoal.errors import ShoalError
from shoal.protocol.history import Status
from shoal.watch.figures import Pace
from shoal.watch.page.overview import accuracy, curves, overview, point, run_name
from shoal.watch.page.work import flow
from shoal.watch.run import Run

LOOK_S = 1.0
SHARE = 0.02  # of one core, at most, for looking and telling
FAR_APART_S = 10.0  # between two looks, at most, whatever telling the pages costs
FLOW_S = 5.0  # between two counts of the verdicts and groups of all steps
FAR = 400  # new steps beyond which a page opens anew
BEAT_S = 15.0  # a sign of life, so that a proxy keeps the connection
MOST_WAITING = 64  # requests that wait for the run's thread
T = TypeVar("T")


class BusyError(ShoalError):
    """More requests wait than will be answered soon."""


@dataclass(frozen=True)
class Seen:
    """What a page has: steps, evaluations. Written `12.3`."""

    steps: int = 0
    evaluations: int = 0

    @classmethod
    def read(cls, text: str) -> Self | None:
        """None for anything else than `12.3`."""
        steps, dot, evaluations = text.partition(".")
        if not dot or not steps.isdecimal() or not evaluations.isdecimal() or len(text) > 20:
            return None
        return cls(int(steps), int(evaluations))

    def __str__(self) -> str:
        return f"{self.steps}.{self.evaluations}"


class Feed:
    def __init__(self, run: Run, others: list[Run]) -> None:
        self.run = run
        self.others = others
        self.pace = Pace()
        self.status: Status | None = None
        self.problem = ""
        self._overview = ""  # JSON
        self._step, self._evaluation = lru_cache(FAR)(self._new_step), lru_cache(FAR)(self._new_evaluation)
        self._flow: tuple[float, dict[str, Any]] = (-FLOW_S, {})
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="run")
        self._waiting = 0
        self._watching = 0
        self._turn = 0
        self._opening = asyncio.Lock()
        self._news = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    # --- one look ----------------------------------------------------------------------------------------------------

    async def ask(self, question: Callable[[], T]) -> T:
        """Run something that reads the run, in its thread. Raises BusyError."""
        if self._waiting >= MOST_WAITING:
            raise BusyError("too many requests wait; try again in a moment")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, question)
        finally:
            self._waiting -= 1

    def refresh(self) -> bool:
        """In the run's thread: look, if there is anything to see. Whether the page has to change."""
        if not self.run.changed() and self.status is not None and not self.run.running() and not self._still_running():
            return False
        try:
            self.status, self.problem = self.run.look(), ""
        except ShoalError as error:
            self.problem = str(error)
            if self.status is None:
                raise
        self.pace.add(self.status)
        found = overview(self.run, self.status, answers=not self.problem)
        text = json.dumps(found, allow_nan=False)
        changed, self._overview = text != self._overview, text
        return changed

    def _timed_look(self) -> tuple[bool, float]:
        """In the run's thread: whether the page has to change; the look's CPU seconds (a slow network costs none)."""
        used_s = time.thread_time()
        return self.refresh(), time.thread_time() - used_s

    def _still_running(self) -> bool:
        return '"state": "running"' in self._overview

    def open(self) -> dict[str, Any]:
        """In the run's thread: all that a page shows first."""
        if self.status is None or not self._watching:
            self.refresh()
        return {
            "overview": json.loads(self._overview),
            "curves": curves(self.run.history.metrics),
            "evaluations": [accuracy(found) for found in self.run.history.evaluations],
            "flow": self.flow(),
            "details": self.run.folder is not None,
            "others": [
                {
                    "name": run_name(other.name),
                    "curves": _only_reward(curves(other.history.metrics)),
                    "evaluations": [accuracy(found) for found in other.history.evaluations],
                }
                for other in self.others
            ],
            "seen": str(self.seen()),
        }

    def flow(self) -> dict[str, Any]:
        """In the run's thread: counted again at most every FLOW_S, and never for more than SHARE of the time."""
        if self.run.folder is None:
            return {}
        counted_s, found = self._flow
        now_s = time.monotonic()
        if now_s - counted_s >= FLOW_S:
            found = flow(self.run.work())
            took_s = time.monotonic() - now_s
            self._flow = (now_s + max(0.0, took_s / SHARE - FLOW_S), found)
        return found

    def seen(self) -> Seen:
        return Seen(len(self.run.history.metrics), len(self.run.history.evaluations))

    # --- for every page ----------------------------------------------------------------------------------------------

    async def events(self, seen: Seen | None) -> AsyncIterator[bytes]:
        """Server-sent events from `seen` on; a page that is too far behind is told to open anew."""
        if self._task is None:
            self._task = asyncio.create_task(self._look_on())
        self._watching += 1
        shown = ""
        try:
            async with self._opening:  # the first page of many that come at once looks, the others find it done
                if self.status is None or self._watching == 1:
                    await self.ask(self.refresh)
            yield b"retry: 2000\n\n"
            while True:
                now, turn = self.seen(), self._turn
                if seen is None or seen.steps > now.steps or now.steps - seen.steps > FAR:
                    yield event("reopen", "{}", str(now))
                    seen = now
                while seen.steps < now.steps:
                    seen = Seen(seen.steps + 1, seen.evaluations)
                    yield self._step(seen)
                while seen.evaluations < now.evaluations:
                    seen = Seen(seen.steps, seen.evaluations + 1)
                    yield self._evaluation(seen)
                if shown != self._overview:
                    shown = self._overview
                    yield event("overview", shown)
                try:
                    async with asyncio.timeout(BEAT_S), self._news:
                        await self._news.wait_for(lambda before=turn: self._turn != before)  # type: ignore[misc]
                except TimeoutError:
                    yield b": beat\n\n"
        finally:
            self._watching -= 1

    def _new_step(self, seen: Seen) -> bytes:
        """The event of the last step of `seen`."""
        step = self.run.history.metrics[seen.steps - 1]
        return event("step", json.dumps(point(step), allow_nan=False), str(seen))

    def _new_evaluation(self, seen: Seen) -> bytes:
        found = self.run.history.evaluations[seen.evaluations - 1]
        return event("evaluation", json.dumps(accuracy(found), allow_nan=False), str(seen))

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _look_on(self) -> None:
        """Look while anybody watches."""
        while True:
            used_s, looked_s = time.thread_time(), 0.0
            if self._watching:
                changed, looked_s = await self.ask(self._timed_look)
                if changed:
                    async with self._news:
                        self._turn += 1
                        self._news.notify_all()
            await asyncio.sleep(LOOK_S)  # the pages are told meanwhile
            told_s = time.thread_time() - used_s
            await asyncio.sleep(rest_s(looked_s, told_s))


def rest_s(looked_s: float, told_s: float) -> float:
    """How long to rest after LOOK_S, for SHARE of one core to cover both."""
    both_s = min((looked_s + told_s) / SHARE, FAR_APART_S)
    return max(both_s, looked_s / SHARE, LOOK_S) - LOOK_S


def event(kind: str, data: str, id_: str = "") -> bytes:
    """One server-sent event. `data` is JSON, which has no line ends."""
    name = f"id: {id_}\n" if id_ else ""
    return f"{name}event: {kind}\ndata: {data}\n\n".encode()


def _only_reward(found: dict[str, Any]) -> dict[str, Any]:
    return {"x": found["x"], "values": {"reward": found["values"].get("reward", [])}}
