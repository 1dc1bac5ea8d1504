"""Virtual time: an event loop whose clock jumps to the next timer. It serves tests without sockets or threads."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

_now_s = 1_000.0


class _Selector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will ever happen: no timer is set"
        advance(timeout)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__(_Selector())

    def time(self) -> float:
        return _now_s


def now_s() -> float:
    return _now_s


def advance(seconds: float) -> None:
    global _now_s
    _now_s += max(seconds, 0.0)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine as `asyncio.run` does, but in virtual time. The time continues from one call to the next."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)
