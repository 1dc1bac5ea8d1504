"""Which server a downloader uses, how it judges answers, and how long it waits."""

import asyncio
import random
import sys
import time
from collections import Counter

import pytest
from aiohttp import web
from blake3 import blake3

from shoal.shardcast import FetchError
from shoal.shardcast.fetch import BadData, NotHeld, SourceError
from shoal.shardcast.fetch.download import Sources
from shoal.shardcast.fetch.source import WAKE_BYTES, Incoming, Standing
from shoal.shardcast.manifest import ShardEntry

from . import virtual
from .support import (
    PUBLIC_KEY,
    SHARD_BYTES,
    Known,
    Memory,
    Middle,
    Stub,
    access,
    answering,
    between,
    choosing,
    flipped,
    published,
    serving,
    shard,
    shard_data,
    until,
)


def bring(sources, index: int = 0, *, timeout_s: float = 5.0, **options) -> Memory:
    """Fetch one shard from whichever server delivers it."""
    sink = Memory()
    virtual.run(bringing(sources, sink, index, timeout_s, **options))
    assert bytes(sink.data) == shard_data(index)
    return sink


async def bringing(sources, sink, index=0, timeout_s=5.0, **options) -> None:
    incoming = Incoming(shard(index), sink)
    await sources.shard(7, "full", incoming, deadline_s=virtual.now_s() + timeout_s, **options)


# The choice of a server


def shares(*stubs: Stub, times: int = 2_000) -> list[float]:
    random.seed(0)
    sources = choosing(*stubs)

    async def run():
        for _ in range(times):
            await bringing(sources, Memory())

    virtual.run(run())
    return [len(stub.requests) / times for stub in stubs]


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        ([(300, 1.0), (100, 1.0)], [0.75, 0.25]),
        ([(100, 1.0), (100, 1.0), (100, 1.0)], [1 / 3] * 3),
        ([(100, 1.0), (100, 0.5)], [2 / 3, 1 / 3]),
        ([(300, 0.5), (100, 1.0), (50, 1.0)], [0.5, 1 / 3, 1 / 6]),
        ([(1000, 1.0), (10, 1.0)], [0.99, 0.01]),  # the slowest still gets a share
        ([(300, 1.0), (None, 1.0)], [0.5, 0.5]),  # an unmeasured server may be as good as the best
        ([(None, 1.0), (None, 0.25)], [0.8, 0.2]),
    ],
)
def test_a_source_is_chosen_in_proportion_to_throughput_and_success(standings, expected):
    stubs = [Stub(f"http://{n}", standing=Known(*standing)) for n, standing in enumerate(standings)]
    assert shares(*stubs) == pytest.approx(expected, abs=0.03)


def test_servers_that_order_leaves_out_are_not_used():
    bad = [Stub(f"http://{n}", *[BadData(f"http://{n}", "wrong")] * 9) for n in range(3)]
    with pytest.raises(FetchError, match="every server was tried"):
        bring(choosing(*bad), order=lambda shard, usable: bad[:0:-1])
    assert [len(stub.requests) for stub in bad] == [0, 3, 3]


# Standings


def test_speed_is_a_moving_average_of_deliveries_and_is_forgotten_with_time():
    standing = Standing(virtual.now_s)
    standing.failed(0.1, 2.0)
    assert standing.speed_Bps() is None
    standing.delivered(1_000, 1.0)
    standing.failed(0.1, 2.0)
    assert standing.speed_Bps() == 1_000
    standing.delivered(2_000, 1.0)
    assert standing.speed_Bps() == 1_250
    virtual.advance(Standing.FORGOTTEN_AFTER_S + 1)
    assert standing.speed_Bps() is None
    standing.delivered(50, 1.0)
    assert standing.speed_Bps() == 50


def test_the_success_rate_falls_with_failures_and_recovers_with_time_and_deliveries():
    standing = Standing(virtual.now_s)
    assert standing.success() == 1
    for _ in range(4):
        standing.failed(0.1, 2.0)
    assert standing.success() == pytest.approx(0.75**4)
    standing.delivered(1, 1.0)
    assert 0.75**4 < standing.success() < 0.75
    virtual.advance(Standing.HEALS_IN_S)
    assert 0.7 < standing.success() < 0.9
    virtual.advance(10 * Standing.HEALS_IN_S)
    assert standing.success() > 0.999


def test_not_having_a_shard_yet_does_not_lower_the_success_rate():
    behind = Stub("http://a", NotHeld("http://a", "404"))
    bring(choosing(behind))
    assert (len(behind.requests), behind.standing.success()) == (2, 1)


# Failures


def test_wrong_data_is_requested_again_a_few_times_and_the_error_names_all_servers():
    stubs = [Stub(f"http://{n}", *[BadData(f"http://{n}", f"wrong {n}")] * 9) for n in range(2)]
    with pytest.raises(FetchError, match=r"every server was tried \(http://.: wrong .; http://.: wrong .\)"):
        bring(choosing(*stubs))
    assert [len(stub.requests) for stub in stubs] == [3, 3]


def test_a_server_that_sent_wrong_data_is_used_after_the_others():
    bad, good = Stub("http://bad", *[BadData("http://bad", "wrong")] * 9), Stub("http://good")
    bring(choosing(bad, good))
    assert len(bad.requests) <= 1


def test_a_failing_server_is_retried_with_growing_pauses_until_the_deadline():
    deaf = Stub("http://a", *[SourceError("http://a", "answered 500")] * 99)
    started_s = virtual.now_s()
    with pytest.raises(FetchError, match=r"the deadline passed \(http://a: answered 500\)"):
        bring(choosing(deaf), timeout_s=1.0)
    assert virtual.now_s() - started_s == pytest.approx(0.7)
    assert len(deaf.requests) == 4  # with pauses of 0.1, 0.2 and 0.4 s between them


def test_a_server_without_the_shard_is_retried_while_another_fails():
    behind = Stub("http://behind", *[NotHeld("http://behind", "404")] * 3)
    silent = Stub("http://silent", *[SourceError("http://silent", "sent nothing")] * 99)
    bring(choosing(behind, silent))
    assert len(behind.requests) == 4


def test_retry_after_is_respected():
    busy = Stub("http://a", SourceError("http://a", "answered 429", retry_after_s=0.4))
    started_s = virtual.now_s()
    bring(choosing(busy))
    assert virtual.now_s() - started_s == pytest.approx(0.4)
    assert busy.standing.success() == 1  # a request to wait is not a failure


def test_another_server_is_used_during_a_back_off():
    busy = Stub("http://a", SourceError("http://a", "answered 429", retry_after_s=30))
    other = Stub("http://b")
    started_s = virtual.now_s()
    bring(choosing(busy, other))
    bring(choosing(busy, other))
    assert virtual.now_s() == started_s


@pytest.mark.parametrize(
    ("header", "rest_s"), [("2", 2), ("999999999999", 30), ("-1", None), ("Wed, 21 Oct 2026 07:28:00 GMT", None)]
)
async def test_retry_after_is_bounded(header, rest_s):
    async def busy(request):
        return web.Response(status=503, headers={"Retry-After": header})

    async with answering(busy) as url, Sources.open(access(), [url]) as sources:
        with pytest.raises(SourceError, match="answered 503") as error:
            await sources.sources[0].shard(7, "full", Incoming(shard(0), Memory()))
        assert error.value.retry_after_s == rest_s


# Patience


def test_a_slow_server_is_abandoned_after_patience_s_if_there_is_another():
    dripping = Stub("http://a", 60, standing=Known(1e9), pieces=600)
    sources = choosing(dripping, Stub("http://b", standing=Known(1.0)), patience_s=0.3)
    started_s = virtual.now_s()
    bring(sources)
    assert virtual.now_s() - started_s == pytest.approx(0.3)
    assert sources.patience_s == 0.6  # doubled, because our own link may be the slow one


def test_the_only_server_may_use_all_the_time():
    slow = Stub("http://a", 0.6)
    bring(choosing(slow, patience_s=0.1))
    assert len(slow.requests) == 1


def test_no_server_is_waited_for_past_the_deadline():
    started_s = virtual.now_s()
    with pytest.raises(FetchError, match="the deadline passed"):
        bring(choosing(Stub("http://a", *[60] * 9), Stub("http://b", *[60] * 9)), timeout_s=0.5)
    assert virtual.now_s() - started_s < 2


async def answer_after_script(stub):
    await asyncio.sleep(stub.script[0])
    return stub.url


def query_all(stubs, question, **options):
    """Return the answers, the queried URLs, and the seconds it took."""
    queried = []

    async def ask(stub):
        queried.append(stub.url)
        return await question(stub)

    async def run():
        return await sources.ask(ask, **options)

    sources, started_s = choosing(*stubs), virtual.now_s()
    answers, _ = virtual.run(run())
    return list(answers.values()), queried, virtual.now_s() - started_s


def test_a_silent_server_delays_one_query_by_hedge_s_and_later_ones_not_at_all():
    hanging, *others = stubs = [Stub(f"http://{name}", 60.0 if name == "a" else 0.01) for name in "abcde"]
    waits_s = []
    for _ in range(40):
        answers, _, took_s = query_all(stubs, answer_after_script)
        assert answers[0] in {stub.url for stub in others}
        waits_s.append(took_s)
    # In one of 7,500 runs this fails by chance, because no query goes to the silent server first.
    assert sum(wait_s > 0.02 for wait_s in waits_s) == 1
    assert max(waits_s) < 0.3 and hanging.standing.silent()


def test_a_query_goes_to_as_many_servers_as_needed():
    stubs = [Stub(f"http://{number}", 0.01) for number in range(100)]
    assert len(query_all(stubs, answer_after_script)[1]) == 1
    assert len(query_all(stubs, answer_after_script, enough=2)[1]) == 2


def test_after_not_found_the_next_server_is_queried_at_once():
    async def question(stub):
        if stub.url != "http://9":
            raise NotHeld(stub.url, "404")
        return stub.url

    stubs = [Stub(f"http://{number}") for number in range(10)]
    answers, _, took_s = query_all(stubs, question)
    assert answers == ["http://9"] and took_s < 0.01
    assert not any(stub.standing.silent() or stub.standing.success() < 1 for stub in stubs)


def test_hedging_starts_later_if_answers_usually_take_long():
    far = [Stub(f"http://{number}", 0.5) for number in range(3)]
    for _ in range(10):
        query_all(far, answer_after_script)
    _, queried, took_s = query_all(far, answer_after_script)
    assert len(queried) == 1 and 0.49 < took_s < 0.51


def test_ask_all_skips_silent_servers():
    stubs = [Stub(f"http://{name}", 60.0 if name == "a" else 0.01) for name in "abc"]
    sources = choosing(*stubs)
    first, _ = virtual.run(ask_all(sources))
    started_s = virtual.now_s()
    second, _ = virtual.run(ask_all(sources))
    assert len(first) == len(second) == 2 and virtual.now_s() - started_s < 0.02
    virtual.advance(Standing.SILENT_S)
    stubs[0].script = [0.01]
    stubs[0].standing = Standing()  # as if its timeout had passed
    assert len(virtual.run(ask_all(sources))[0]) == 3


async def ask_all(sources):
    return await sources.ask_all(answer_after_script, among=sources.sources)


# Over HTTP: parts of a shard, and which server is at fault


class StoredShard:
    """One shard of a published version."""

    def __init__(self, tmp_path) -> None:
        self.store = published(tmp_path, 7).store
        self.shard = self.store.signed(7).open(PUBLIC_KEY).content.entries()[1]
        self.data = self.store.shard_path(7, "full", 1).read_bytes()

    def incoming(self, beginning: bytes = b"") -> tuple[Incoming, Memory]:
        """A shard whose beginning another server has sent."""
        sink = Memory()
        incoming = Incoming(self.shard, sink)
        if beginning:
            incoming.take(beginning)
            incoming.senders.add("http://another")
        return incoming, sink


@pytest.fixture
def stored(tmp_path):
    return StoredShard(tmp_path)


def fetch_from(stored: StoredShard, incoming: Incoming, **settings) -> tuple[Middle, Exception | None]:
    async def run():
        async with (
            serving(stored.store) as up,
            between(up, **settings) as middle,
            Sources.open(access(), [middle.url]) as sources,
        ):
            try:
                await sources.sources[0].shard(7, "full", incoming)
            except SourceError as error:
                return middle, error
            return middle, None

    return asyncio.run(run())


def test_only_missing_bytes_are_requested(stored):
    incoming, sink = stored.incoming(stored.data[:6_000])
    middle, error = fetch_from(stored, incoming)
    assert error is None and bytes(sink.data) == stored.data
    assert (middle.requests[0][1], middle.sent_bytes) == ("bytes=6000-", 4_000)


def test_a_server_that_ignores_ranges_sends_the_whole_shard(stored):
    incoming, sink = stored.incoming(b"x" * 6_000)  # the wrong beginning does no harm
    middle, error = fetch_from(stored, incoming, passes_ranges=False)
    assert error is None and bytes(sink.data) == stored.data
    assert middle.sent_bytes == SHARD_BYTES


def test_a_wrong_hash_is_the_fault_of_a_server_that_sent_the_whole_shard(stored):
    incoming, sink = stored.incoming()
    _, error = fetch_from(stored, incoming, change=lambda path, data: flipped(data))
    assert isinstance(error, BadData) and "corrupt" in str(error)
    assert incoming.size_bytes == 0 and not sink.data


@pytest.mark.parametrize("wrong", ["first", "second"])
def test_a_wrong_hash_is_no_servers_fault_if_several_sent_parts(stored, wrong):
    beginning = stored.data[:6_000]
    incoming, sink = stored.incoming(flipped(beginning) if wrong == "first" else beginning)
    change = (lambda path, data: flipped(data)) if wrong == "second" else (lambda path, data: data)
    _, error = fetch_from(stored, incoming, change=change)
    assert type(error) is SourceError and "corrupt" in str(error)
    assert not sink.data  # all of it is fetched again
    assert fetch_from(stored, incoming)[1] is None
    assert bytes(sink.data) == stored.data


def test_a_response_is_not_read_beyond_the_shard(stored):
    incoming, sink = stored.incoming()
    middle, error = fetch_from(stored, incoming, change=lambda path, data: data * 1_000, rate_Bps=1e6)
    assert error is None and bytes(sink.data) == stored.data
    assert middle.sent_bytes < 1_000_000


def test_a_short_response_is_kept_and_the_rest_may_come_from_another_server(stored):
    incoming, sink = stored.incoming()
    _, error = fetch_from(stored, incoming, change=lambda path, data: data[:6_000])
    assert isinstance(error, BadData) and "ended after 6000 of 10000 bytes" in str(error)
    middle, error = fetch_from(stored, incoming)
    assert error is None and bytes(sink.data) == stored.data
    assert middle.requests[0][1] == "bytes=6000-"


def test_a_shard_that_is_too_short_on_the_server_is_wrong_data(stored):
    path = stored.store.shard_path(7, "full", 1)
    path.write_bytes(stored.data[:6_000])
    incoming, _ = stored.incoming(stored.data[:6_000])
    _, error = fetch_from(stored, incoming)
    assert isinstance(error, BadData) and "too short" in str(error)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "malformed"),
        (b"[]", "malformed"),
        (b'{"versions":[-1]}', "malformed"),
        (b" " * 300_000, "longer than 262144"),
    ],
)
async def test_a_malformed_listing_is_wrong_data(body, reason):
    async def answer(request):
        return web.Response(body=body)

    async with answering(answer) as url, Sources.open(access(), [url]) as sources:
        with pytest.raises(BadData, match=reason):
            await sources.sources[0].listing()


async def test_each_request_gets_a_new_token():
    """A relay keeps one HTTP session open for longer than any token is valid."""
    seen: list[str] = []

    async def answer(request):
        seen.append(request.headers["Authorization"])
        return web.json_response({"versions": []})

    shared = access()
    tokens = iter(["one", "two"])
    shared.token = lambda url: next(tokens)
    async with answering(answer) as url, Sources.open(shared, [url]) as sources:
        for _ in range(2):
            await sources.sources[0].listing()
    assert seen == ["Bearer one", "Bearer two"]


# Reading


@pytest.mark.skipif(
    sys.platform != "linux", reason="only on Linux does a socket wait for many bytes before it wakes its reader"
)
async def test_a_body_that_arrives_slowly_is_read_in_large_pieces():
    data, sizes, readers = random.Random(0).randbytes(200_000), [], set()

    async def drip(request):
        readers.add(request.transport.get_extra_info("peername"))
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        for at in range(0, len(data), 1_000):
            await response.write(data[at : at + 1_000])
            await asyncio.sleep(0.001)
        return response

    class Sizes(Memory):
        def write(self, offset_bytes: int, data: bytes) -> None:
            super().write(offset_bytes, data)
            sizes.append(len(data))

    async with answering(drip) as url, Sources.open(access(), [url]) as sources:
        for _ in range(2):  # the second request uses the same connection
            incoming = Incoming(ShardEntry(0, len(data), blake3(data).hexdigest()), Sizes())
            await sources.shard(7, "full", incoming, deadline_s=time.monotonic() + 60)
    assert len(sizes) <= 2 * (len(data) // WAKE_BYTES + 3)
    assert len(readers) == 1, "the reader must not wait for more than the body has, until the connection is closed"


# Changing the set of servers


async def test_a_removed_server_finishes_its_shard_and_is_not_used_again(stored):
    incoming, sink = stored.incoming()
    async with (
        serving(stored.store) as up,
        between(up, rate_Bps=30_000) as old,
        between(up) as new,
        Sources.open(access(), [old.url]) as sources,
    ):
        fetching = asyncio.create_task(sources.shard(7, "full", incoming, deadline_s=time.monotonic() + 10))
        await until(lambda: old.sent_bytes)
        sources.use([new.url])
        await fetching
        assert bytes(sink.data) == stored.data
        assert sources.by_source() == {old.url: SHARD_BYTES}
        again, _ = stored.incoming()
        await sources.shard(7, "full", again, deadline_s=time.monotonic() + 10)
        assert sources.by_source() == {old.url: SHARD_BYTES, new.url: SHARD_BYTES}
        sources.use([old.url + "/", new.url, new.url])  # duplicates and a final slash make no difference
        assert Counter(source.url for source in sources.sources) == {old.url: 1, new.url: 1}
        assert sources.received_bytes == 2 * SHARD_BYTES


async def test_standings_outlive_a_download(stored):
    shared = access()
    async with serving(stored.store) as up:
        for _ in range(2):
            async with Sources.open(shared, [up]) as sources:
                incoming, _ = stored.incoming()
                await sources.shard(7, "full", incoming, deadline_s=time.monotonic() + 10)
        known, speed_Bps = list(shared.standings) == [up], shared.standings[up].speed_Bps()
    assert known and speed_Bps > 0
