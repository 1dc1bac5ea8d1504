"""Turns of callers, and calls in threads whose clients leave."""

import asyncio
import threading
from types import SimpleNamespace
from typing import cast

import pytest

from shoal.serve.errors import BusyError
from shoal.serve.threads import WAITING, Places, Threads
from shoal.serve.versions import LoadedModel

from .support import DEADLINE_S


async def until_idle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_callers_take_turns_however_many_requests_one_has() -> None:
    async def main() -> list[str]:
        places, order = Places(1), list[str]()

        async def ask(caller: str) -> None:
            await places.take(caller)
            order.append(caller)
            await asyncio.sleep(0)
            places.leave(caller)

        await asyncio.gather(*(ask("greedy") for _ in range(5)), ask("other"), ask("third"))
        return order

    assert asyncio.run(main()) == ["greedy", "greedy", "other", "third", "greedy", "greedy", "greedy"]


def test_one_caller_never_has_all_places() -> None:
    async def main() -> None:
        places = Places(3, per_caller=2)
        first = [asyncio.create_task(places.take("greedy")) for _ in range(3)]
        await until_idle()
        assert [one.done() for one in first] == [True, True, False]
        await places.take("other")

    asyncio.run(main())


def test_who_leaves_the_line_or_gets_a_place_while_leaving_holds_none() -> None:
    async def main() -> None:
        places = Places(1)
        await places.take("one")
        waiting = [asyncio.create_task(places.take(caller)) for caller in ("two", "three")]
        await until_idle()
        waiting[0].cancel()
        await until_idle()
        places.leave("one")  # given to the third ...
        waiting[1].cancel()  # ... who leaves at this moment
        await until_idle()
        await asyncio.wait_for(places.take("four"), DEADLINE_S)

    asyncio.run(main())


def test_a_line_has_an_end_and_waiting_a_deadline() -> None:
    async def main() -> None:
        places = Places(1, wait_s=0.01)
        await places.take("one")
        with pytest.raises(BusyError, match="no slot became free within"):
            await places.take("two")
        places.wait_s = DEADLINE_S
        tasks = [asyncio.create_task(places.take("two")) for _ in range(WAITING)]
        await until_idle()
        with pytest.raises(BusyError, match="waiting already"):
            await places.take("two")
        for task in tasks:
            task.cancel()

    asyncio.run(main())


def test_a_place_is_free_when_the_thread_ends_not_when_the_client_leaves() -> None:
    go, running = threading.Event(), list[int]()

    def work() -> int:
        running.append(1)
        assert go.wait(DEADLINE_S)
        return 5

    async def main() -> int:
        threads, version = Threads("test", 1), cast(LoadedModel, SimpleNamespace(users=0))
        for _ in range(3):
            task = asyncio.create_task(threads.run("one", work, version))
            await until_idle()
            task.cancel()
        last = asyncio.create_task(threads.run("two", lambda: 7))
        await until_idle()
        assert version.users == 1 and not last.done()  # those that left before their turn never run
        go.set()
        found = await asyncio.wait_for(last, DEADLINE_S)
        assert version.users == 0
        return found

    assert asyncio.run(main()) == 7
    assert len(running) == 1
