"""Callers take turns. A call holds its slot until it has ended in its thread, even if the client disconnects."""

import asyncio
import threading
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from shoal.model.dtype import use_threads
from shoal.serve.errors import BusyError
from shoal.serve.threads import MAX_WAITING, FairSemaphore, FairThreadPool
from shoal.serve.versions import LoadedModel

from .support import DEADLINE_S


async def until_idle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_callers_take_turns_even_if_one_has_many_more_requests() -> None:
    async def main() -> list[str]:
        slots, order = FairSemaphore(1), list[str]()

        async def use(caller: str) -> None:
            await slots.acquire(caller)
            order.append(caller)
            await asyncio.sleep(0)
            slots.release(caller)

        await asyncio.gather(*(use("greedy") for _ in range(5)), use("other"), use("third"))
        return order

    assert asyncio.run(main()) == ["greedy", "greedy", "other", "third", "greedy", "greedy", "greedy"]


def test_one_caller_never_holds_all_slots() -> None:
    async def main() -> None:
        slots = FairSemaphore(3, per_caller=2)
        tasks = [asyncio.create_task(slots.acquire("greedy")) for _ in range(3)]
        await until_idle()
        assert [task.done() for task in tasks] == [True, True, False]
        await slots.acquire("other")

    asyncio.run(main())


def test_a_waiter_that_is_cancelled_as_it_gets_a_slot_does_not_keep_the_slot() -> None:
    async def main() -> None:
        slots = FairSemaphore(1)
        await slots.acquire("one")
        waiting = [asyncio.create_task(slots.acquire(caller)) for caller in ("two", "three")]
        await until_idle()
        waiting[0].cancel()
        await until_idle()
        slots.release("one")  # grants the slot to "three" ...
        waiting[1].cancel()  # ... which is cancelled at the same moment
        await until_idle()
        await asyncio.wait_for(slots.acquire("four"), DEADLINE_S)

    asyncio.run(main())


def test_a_queue_is_bounded_and_waiting_has_a_deadline() -> None:
    async def main() -> None:
        slots = FairSemaphore(1, wait_s=0.01)
        await slots.acquire("one")
        with pytest.raises(BusyError, match="no slot became free within"):
            await slots.acquire("two")
        slots.wait_s = DEADLINE_S
        tasks = [asyncio.create_task(slots.acquire("two")) for _ in range(MAX_WAITING)]
        await until_idle()
        with pytest.raises(BusyError, match="waiting already"):
            await slots.acquire("two")
        for task in tasks:
            task.cancel()

    asyncio.run(main())


def test_a_slot_becomes_free_when_the_call_ends_not_when_the_client_disconnects() -> None:
    go, started = threading.Event(), list[int]()

    def work() -> int:
        started.append(1)
        assert go.wait(DEADLINE_S)
        return 5

    async def main() -> int:
        threads, version = FairThreadPool("test", 1), cast(LoadedModel, SimpleNamespace(users=0))
        for _ in range(3):
            task = asyncio.create_task(threads.run("one", work, version))
            await until_idle()
            task.cancel()
        last = asyncio.create_task(threads.run("two", lambda: 7))
        await until_idle()
        assert version.users == 1 and not last.done()  # only the first call has begun
        go.set()
        result = await asyncio.wait_for(last, DEADLINE_S)
        assert version.users == 0
        return result

    assert asyncio.run(main()) == 7
    assert len(started) == 1, "a call that was cancelled before its turn ran"


def test_a_thread_computes_on_all_cores_if_it_starts_while_another_uses_one() -> None:
    async def main() -> int:
        threads = FairThreadPool("test", 1)
        with use_threads(1):
            await threads.run("one", torch.get_num_threads)
        return await threads.run("one", torch.get_num_threads)

    with use_threads(3):
        assert asyncio.run(main()) == 3
