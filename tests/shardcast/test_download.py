"""`StreamDownload` fetches all shards of a stream, several at a time, from several servers. The tests run in virtual
time."""

import asyncio

import pytest

from shoal.shardcast import FetchError
from shoal.shardcast.fetch import BadData
from shoal.shardcast.fetch.download import StreamDownload

from . import virtual
from .support import Known, Memory, Stub, choosing, shard, shard_data


class Run:
    """A download of numbered shards into memory."""

    def __init__(self, *stubs: Stub, parallel: int = 4, order=None, stall_s: float = 60.0, **limits):
        self.sinks: dict[int, Memory] = {}
        self.arrived: list[int] = []
        self.sources = choosing(*stubs, **limits)
        self.options = {"parallel": parallel, "order": order, "stall_s": stall_s}

    def all(self, count: int, timeout_s: float = 100.0) -> float:
        """Fetch `count` shards. Return the seconds it took."""
        download = StreamDownload(
            self.sources,
            7,
            "full",
            [list(map(shard, range(count)))],
            lambda shard: self.sinks.setdefault(shard.index, Memory()),
            deadline_s=virtual.now_s() + timeout_s,
            on_shard=lambda shard: self.arrived.append(shard.index),
            **self.options,
        )
        started_s = virtual.now_s()
        virtual.run(download.run())
        assert sorted(self.arrived) == list(range(count))
        assert {index: bytes(sink.data) for index, sink in self.sinks.items()} == {
            index: shard_data(index) for index in range(count)
        }
        assert all(sink.done_count == 1 for sink in self.sinks.values())
        return virtual.now_s() - started_s


def test_shards_are_requested_in_order_and_several_at_once():
    stub = Stub("http://a", *[0.01] * 40)
    Run(stub, parallel=4).all(40)
    assert stub.requests == list(range(40))
    assert stub.max_running == 4


def test_an_empty_download_ends_at_once():
    assert Run(Stub("http://a")).all(0) < 1


def test_the_first_failure_ends_the_download():
    bad = Stub("http://a", *[BadData("http://a", "wrong")] * 3)
    with pytest.raises(FetchError, match="shard 0"):
        Run(bad, parallel=1).all(5)


def test_a_disk_error_ends_the_download():
    class Full(Memory):
        def write(self, offset_bytes, data):
            raise OSError(28, "No space left on device")

    run = Run(Stub("http://a"))
    run.sinks[0] = Full()
    with pytest.raises(OSError, match="No space left"):
        run.all(3)


def test_a_download_without_progress_fails_and_names_the_servers():
    silent = [Stub(f"http://{name}", *[1e6] * 99) for name in "ab"]
    run = Run(*silent, stall_s=20.0)
    with pytest.raises(
        FetchError, match=r"no progress for 20 s, with 3 of its shards missing; http://a, http://b send"
    ):
        run.all(3, timeout_s=1e6)


# Servers that are slow or silent


def slow_and_quick(*script) -> tuple[Stub, Stub]:
    """Return a slow server and a quick one. The slow one is tried first, because its standing is far better."""
    return Stub("http://slow", *script, standing=Known(1e12)), Stub("http://quick", standing=Known(1.0))


def test_shards_that_hang_are_fetched_from_another_server():
    slow, quick = slow_and_quick(0, 0, 60, 60, 60)
    assert Run(slow, quick, patience_s=30).all(5) < 0.5
    assert sorted(quick.requests) == [2, 3, 4]


def test_a_shard_that_stops_arriving_continues_from_another_server_at_the_same_byte():
    class Slow(Stub):
        async def shard(self, version, part, incoming):
            incoming.take(shard_data(0)[:40])
            await asyncio.sleep(120)

    class Fast(Stub):
        async def shard(self, version, part, incoming):
            resumed_at.append(incoming.size_bytes)
            await super().shard(version, part, incoming)

    resumed_at: list[int] = []
    slow = Slow("http://slow", standing=Known(1e12))
    assert Run(slow, Fast("http://quick", standing=Known(1.0)), patience_s=300).all(1) < 1.5
    assert resumed_at == [40]


def test_if_all_servers_are_slow_to_start_each_gets_more_time():
    slow = [Stub(f"http://{name}", *[1.3] * 9) for name in "ab"]
    assert Run(*slow, patience_s=30).all(1) < 5
    assert sum(len(stub.requests) for stub in slow) <= 5


def test_a_single_slow_server_is_not_queried_twice_for_a_shard():
    slow = Stub("http://a", 0, 0, 0, 1.3)
    Run(slow).all(4)
    assert slow.requests == [0, 1, 2, 3]


def test_a_relay_waits_for_the_first_server_in_its_order():
    """That server may still be receiving the shard, and a second copy would burden the origin's uplink."""
    slow, other = slow_and_quick(0, 0, 0, 1.3)
    Run(slow, other, order=lambda shard, usable: [slow, other]).all(4)
    assert other.requests == []


def test_slow_but_steady_shards_are_not_fetched_twice():
    slow = [Stub(f"http://{n}", *[2.0] * 4, pieces=20) for n in range(2)]
    assert Run(*slow).all(4) < 2.1
    assert sum(len(stub.requests) for stub in slow) == 4


def test_a_relay_that_hangs_delays_few_downloads():
    """There are 40 downloads of one shard each. A downloader that ignores past silence would try the relay that hangs
    first in half of them."""
    hanging, quick = Stub("http://hangs", *[60.0] * 99), Stub("http://quick", *[0.01] * 99)
    sources, took_s = choosing(hanging, quick, patience_s=30), []
    for _ in range(40):
        run = Run()
        run.sources = sources
        took_s.append(run.all(1))
    assert max(took_s) < 0.3
    delayed = sum(seconds > 0.1 for seconds in took_s)
    assert delayed <= 4, "after two failures, the relay that hangs must be used last for a while"


def test_a_relay_that_hangs_delays_a_large_download_little():
    hanging, quick = Stub("http://hangs", *[60.0] * 99), Stub("http://quick", *[0.01] * 99)
    run = Run(hanging, quick, parallel=8, patience_s=30)
    assert run.all(40) < 0.05 + 0.3
