"""The leader reads for the other ranks, and sends them the outlines of each step's groups."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from shoal.errors import ShoalError
from shoal.learner.groups import IncomingBatches
from shoal.learner.ranks import Ranks, from_leader

from .support import Pool, run_config, step_file, submission

STEPS = 2


def files() -> list[bytes]:
    return [step_file(step) for step in range(STEPS)]


class Wire:
    """One of two ranks. `sent` holds the leader's messages to the other rank."""

    size = 2

    def __init__(self, sent: list[bytes] | None = None, *, leads: bool = True) -> None:
        self.sent: list[bytes] = [] if sent is None else sent
        self.leads = leads

    def broadcast(self, message: bytes | None) -> bytes:
        if message is None:
            return self.sent.pop(0)
        self.sent.append(message)
        return message


def both(pool: Pool, wire: Any, folder: Path) -> tuple[IncomingBatches, IncomingBatches]:
    """Return the incoming batches of the leader and of another rank."""
    config: Any = run_config(STEPS, {})
    return tuple(IncomingBatches(node, wire, config, folder) for node in (pool, None))  # type: ignore[arg-type,return-value]


def test_other_ranks_get_the_groups_outlines(tmp_path):
    wire, stop = Wire(), threading.Event()
    leader, other = both(Pool(*files()), wire, tmp_path)
    actual = leader.wait(0, stop)
    assert actual is not None and len(json.loads(wire.sent[0])) == 5 and b"tokens" in wire.sent[0]
    received = other.wait(0, stop)
    assert received is not None and received.groups == [group.outline for group in actual.fetched.groups]
    stop.set()
    assert leader.wait(1, stop) is None and other.wait(1, stop) is None


def test_other_ranks_do_not_wait_for_a_failed_leader(tmp_path):
    wire, stop = Wire(), threading.Event()
    leader, other = both(Pool(), wire, tmp_path)
    with pytest.raises(KeyError):
        leader.wait(0, stop)
    assert other.wait(0, stop) is None


# --- the next step's files ---------------------------------------------------------------------------------------------


class Slow(Pool):
    """A pool that signals when it has sent a file."""

    def __init__(self, *files: bytes) -> None:
        super().__init__(*files)
        self.fetched = threading.Event()

    def fetch_file(self, path: str, *, max_bytes: int) -> bytes:
        data = super().fetch_file(path, max_bytes=max_bytes)
        self.fetched.set()
        return data


def test_the_next_steps_files_are_prefetched_once(tmp_path):
    pool, config = Slow(*files()), run_config(2, {})
    incoming = IncomingBatches(pool, Ranks(), config, tmp_path)  # type: ignore[arg-type]
    incoming.prefetch(1)
    assert pool.fetched.wait(60), "the file was not fetched before the wait for its batch"
    actual = incoming.wait(1, threading.Event())
    assert actual is not None
    assert [group.submission for group in actual.fetched.groups] == [submission(1)] * 5
    assert pool.requests == [f"/v1/accepted/{submission(1)}"]
    assert pool.activities == ["the batch of step 2", "training step 2"], "activities must count steps from 1"


def test_an_error_in_the_prefetch_ends_the_wait_on_all_ranks(tmp_path):
    class Gone(Pool):
        def get(self, path: str, kind: Any) -> Any:
            raise ShoalError("the coordinator is gone")

    class Recording(Ranks):
        sent: list[bytes] = []

        def broadcast(self, message: bytes | None) -> bytes:
            self.sent.append(message or b"")
            return b""

    ranks = Recording(0, 2)
    incoming = IncomingBatches(Gone(), ranks, run_config(2, {}), tmp_path)  # type: ignore[arg-type]
    incoming.prefetch(1)
    incoming.node = Pool()  # type: ignore[assignment]
    with ThreadPoolExecutor(1) as wait, pytest.raises(ShoalError, match="is gone"):
        wait.submit(incoming.wait, 1, threading.Event()).result(60)
    assert ranks.sent == [b""]


# --- reading on the leader ---------------------------------------------------------------------------------------------


def on_rank(rank: Any, read: Callable[[], int]) -> int:
    return from_leader(cast(Ranks, rank), read, lambda actual: str(actual).encode(), lambda data: int(data))


def never(*_: Any) -> Any:
    raise AssertionError("this function must not be called")


def refuse() -> int:
    raise ShoalError("no such file")


def test_every_rank_gets_what_the_leader_read():
    wire: list[bytes] = []
    assert on_rank(Wire(wire, leads=True), lambda: 7) == 7
    assert on_rank(Wire(wire, leads=False), never) == 7 and not wire


def test_a_leaders_error_is_raised_on_every_rank():
    wire: list[bytes] = []
    with pytest.raises(ShoalError, match="^no such file"):
        on_rank(Wire(wire, leads=True), refuse)
    with pytest.raises(ShoalError, match="rank 0 ended: no such file"):
        on_rank(Wire(wire, leads=False), never)


def test_a_single_rank_encodes_nothing():
    assert from_leader(Ranks(), lambda: 7, never, never) == 7
