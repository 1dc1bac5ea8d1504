"""The downloader: all shards, several at a time, and late ones a second time from elsewhere."""

import asyncio

import pytest

from shoal.shardcast import FetchError
from shoal.shardcast.fetch import BadData
from shoal.shardcast.fetch.download import Download

from . import virtual
from .support import (
    Known,
    Memory,
    Stub,
    choosing,
    shard,
    shard_data,
)


class Run:
    """One download of numbered shards into memory."""

    def __init__(self, *stubs: Stub, parallel: int = 4, timeout_s: float = 10.0, begun=None, order=None, **limits):
        self.sinks = {index: Memory(data) for index, data in (begun or {}).items()}
        self.arrived: list[int] = []
        self.download = Download(
            choosing(*stubs, **limits),
            7,
            "full",
            lambda shard: self.sinks.setdefault(shard.index, Memory()),
            parallel=parallel,
            deadline_s=virtual.now_s() + timeout_s,
            order=order,
            on_shard=lambda shard: self.arrived.append(shard.index),
        )

    def all(self, count: int) -> float:
        """Brings that many, and says how long it took."""
        self.download.add(map(shard, range(count)), last=True)
        started_s = virtual.now_s()
        virtual.run(self.download.run())
        self.is_right(count)
        return virtual.now_s() - started_s

    def is_right(self, count: int) -> None:
        assert sorted(self.arrived) == list(range(count))
        assert {index: bytes(sink.data) for index, sink in self.sinks.items()} == {
            index: shard_data(index) for index in range(count)
        }
        assert all(sink.times_done == 1 for sink in self.sinks.values())


def test_all_shards_come_in_order_and_only_some_at_once():
    stub = Stub("http://a", *[0.01] * 40)
    Run(stub, parallel=4).all(40)
    assert stub.asked == list(range(40))
    assert stub.most_at_once == 4


def test_nothing_to_fetch_is_soon_done():
    assert Run(Stub("http://a")).all(0) < 1


def test_shards_may_be_named_while_others_arrive():
    run = Run(Stub("http://a"))

    async def naming():
        fetching = asyncio.create_task(run.download.run())
        for index in range(6):
            run.download.add([shard(index)], last=False)
            await asyncio.sleep(0.05)
            assert run.arrived == list(range(index + 1))
        assert not fetching.done()
        run.download.add([], last=True)
        await fetching

    virtual.run(naming())
    run.is_right(6)


def test_shards_that_are_never_named_end_at_the_deadline():
    run = Run(Stub("http://a"), timeout_s=0.3)
    run.download.add([shard(0)], last=False)
    with pytest.raises(FetchError, match="not completed in time"):
        virtual.run(run.download.run())


def test_what_was_begun_is_not_fetched_again():
    stub = Stub("http://a")
    Run(stub, begun={0: shard_data(0), 1: shard_data(1)[:60]}).all(3)
    assert stub.asked == [1, 2]


def test_what_was_begun_and_rotted_is_fetched_anew():
    stub = Stub("http://a")
    Run(stub, begun={0: bytes(100)}).all(1)
    assert stub.asked == [0]


def test_the_first_failure_ends_it_all():
    bad = Stub("http://a", *[BadData("http://a", "wrong")] * 3)
    with pytest.raises(FetchError, match="shard 0"):
        Run(bad, parallel=1).all(5)


def test_a_disk_that_fails_ends_it_with_its_own_error():
    class Full(Memory):
        def write(self, offset_bytes, data):
            raise OSError(28, "No space left on device")

    run = Run(Stub("http://a"))
    run.sinks[0] = Full()
    with pytest.raises(OSError, match="No space left"):
        run.all(3)


# The end


def slow_and_quick(*script) -> tuple[Stub, Stub]:
    """The slow one seems to be far better, so that it is asked."""
    return Stub("http://slow", *script, standing=Known(1e12)), Stub("http://quick", standing=Known(1.0))


def test_a_shard_that_hangs_at_the_end_is_fetched_from_another():
    slow, quick = slow_and_quick(0, 0, 0, 60)
    assert Run(slow, quick, patience_s=30).all(4) < 3
    assert quick.asked == [3]


def test_several_that_hang_are_fetched_from_another():
    slow, quick = slow_and_quick(0, 0, 60, 60, 60)
    assert Run(slow, quick, patience_s=30).all(5) < 3
    assert sorted(quick.asked) == [2, 3, 4]


def test_a_late_shard_that_comes_after_all_ends_it_at_once():
    """Though the copy from the other one would have taken for ever."""
    slow, other = slow_and_quick(0, 0, 0, 1.3)
    other.script = [60.0] * 9
    assert 1.2 < Run(slow, other, patience_s=30).all(4) < 3
    assert set(other.asked) == {3}


def test_a_copy_that_fails_does_not_matter():
    slow, other = slow_and_quick(0, 0, 0, 1.3)
    other.script = [BadData("http://quick", "wrong")] * 9
    assert Run(slow, other, patience_s=30, strikes=1).all(4) < 3


def test_one_source_alone_is_not_asked_twice():
    slow = Stub("http://a", 0, 0, 0, 1.3)
    Run(slow).all(4)
    assert slow.asked == [0, 1, 2, 3]


def test_copies_keep_to_the_order_too():
    slow, other = slow_and_quick(0, 0, 0, 1.3)
    Run(slow, other, order=lambda shard, usable: [slow]).all(4)
    assert other.asked == []


def test_shards_that_merely_take_their_time_are_not_fetched_twice():
    """On a slow link copies would make all of them slower."""
    slow = [Stub(f"http://{n}", *[2.0] * 4, pieces=20) for n in range(2)]
    assert Run(*slow).all(4) < 2.1
    assert sum(len(stub.asked) for stub in slow) == 4


def test_a_relay_that_hangs_costs_a_delta_a_fifth_of_a_second_once():
    """The one shard of a small delta, 40 times: drawn from the one that hangs in half of them."""
    hanging, quick = Stub("http://hangs", *[60.0] * 99), Stub("http://quick", *[0.01] * 99)
    sources, took_s = choosing(hanging, quick, patience_s=30), []
    for _ in range(40):
        run = Run()
        run.download.sources = sources
        took_s.append(run.all(1))
    assert max(took_s) < 0.3
    assert sum(seconds > 0.1 for seconds in took_s) <= 4, "after two such times it is asked last for a while"


def test_many_shards_lose_little_to_a_relay_that_hangs():
    hanging, quick = Stub("http://hangs", *[60.0] * 99), Stub("http://quick", *[0.01] * 99)
    run = Run(parallel=8)
    run.download.sources = choosing(hanging, quick, patience_s=30)
    assert run.all(40) < 0.05 + 0.3


def test_a_server_that_is_slow_to_begin_is_not_overtaken_by_one_that_is_slower():
    slow, slower = Stub("http://slow", 0.5, pieces=5), Stub("http://slower", 60.0)
    run = Run()
    run.download.sources = choosing(slow, slower, patience_s=30)
    for source in run.download.sources.sources:
        source.standing = Known(100.0 if source is slow else 1e-9)
    slow.script = [0.4, 0.4]
    assert run.all(1) < 1.0
