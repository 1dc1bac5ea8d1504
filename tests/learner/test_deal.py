"""Rows reach the ranks that compute them whole and once, whoever knows their tokens."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.errors import ShoalError
from shoal.learner.batch import Row, Rows, micro_batches
from shoal.learner.deal import Turn, deal, decode, encode
from shoal.learner.group import Group
from shoal.learner.incoming import Incoming, Prefetch
from shoal.learner.metrics import Shape
from shoal.learner.ranks import Ranks

from .support import Pool, make_groups, run_config, step_file, submission

SHAPE = Shape(body=1000, head=100, layers=2, width=16)


def groups() -> list[Group]:
    """One of several turns, and one that nobody checked."""
    first, second, third = make_groups()
    turns = [[1, 1], [], [2, 1], []]
    behaviour = [of[: len(of) - bool(own)] for of, own in zip(first.behaviour, turns, strict=True)]
    return [replace(first, turns=turns, behaviour=behaviour), replace(second, checked=False), third]


def planned(known: list[Any], row_tokens: int = 12) -> list[Row]:
    rows = Rows(row_tokens=row_tokens)
    return [row for one in known for row in rows.add(one)] + rows.close()


class Wired(Ranks):
    """One of several ranks in this process: the leader's messages go through `box`."""

    box: list[bytes] = []

    def deal(self, messages: Any, size_bytes: int) -> bytes:
        if messages is not None:
            self.box[:] = messages
        assert len(self.box[self.rank]) == size_bytes, "the rank expects what the leader sends"
        return self.box[self.rank]


def assert_same_row(found: Any, wanted: Any) -> None:
    for name in ("tokens_T", "positions_T", "predictor_N", "target_N"):
        assert torch.equal(getattr(found.pack, name), getattr(wanted.pack, name)), name
    assert found.spans == wanted.spans
    for name in ("behaviour_N", "advantage_N", "rollout_N"):
        assert torch.equal(getattr(found, name).nan_to_num(9.0), getattr(wanted, name).nan_to_num(9.0)), name


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_gets_its_own_rows_and_they_are_those_of_one_rank(size: int) -> None:
    wanted = micro_batches(groups(), row_tokens=12, normalize_std=False)
    outlines = [group.outline for group in groups()]
    dealt: list[list[Turn]] = []
    for rank in range(size):
        rows = planned(groups() if rank == 0 else outlines)
        dealt.append(deal(rows, Wired(rank, size), SHAPE, normalize_std=False))
    found = [micro for turns in dealt for turn in turns if (micro := turn.micro()) is not None]
    assert len(found) == len(wanted) > 4
    by_tokens = {tuple(micro.pack.tokens_T.tolist()): micro for micro in found}
    for micro in wanted:
        assert_same_row(by_tokens[tuple(micro.pack.tokens_T.tolist())], micro)
    together = [[(turn.costs, turn.n_trained, turn.checked) for turn in turns] for turns in dealt]
    assert all(of == together[0] for of in together), "all ranks know what is computed at once"
    assert sum(n for _, n, _ in together[0]) == sum(micro.n_trained for micro in wanted)
    assert {checked for _, _, checked in together[0]} == {True, False}


def test_a_message_of_other_rows_is_refused() -> None:
    rows = planned(groups())
    data = encode([row.contents() for row in rows])
    assert len(data) == 4 * sum(row.n_tokens + row.n_trained for row in rows)
    with pytest.raises(ValueError, match="the ranks planned different rows"):
        decode(data, rows[:-1])


# --- the next step's groups ------------------------------------------------------------------------------------------


class Slow(Pool):
    """Step 1's batch fills while step 0 trains."""

    def __init__(self, *files: bytes) -> None:
        super().__init__(*files)
        self.fetched = threading.Event()

    def get_bytes(self, path: str, *, most_bytes: int) -> bytes:
        data = super().get_bytes(path, most_bytes=most_bytes)
        self.fetched.set()
        return data


def test_the_next_steps_files_are_fetched_beside_training_and_once(tmp_path: Path) -> None:
    pool, config = Slow(step_file(0), step_file(1)), run_config(2, {})
    prefetch = Prefetch(1, pool, config, tmp_path)  # type: ignore[arg-type]
    prefetch.start()
    assert pool.fetched.wait(60), "nobody waits for it"
    incoming = Incoming(1, pool, Ranks(), config, tmp_path, prefetch)  # type: ignore[arg-type]
    assert incoming.more(threading.Event(), at_once=False) and incoming.full
    assert [group.submission for group in incoming.fetched.groups] == [submission(1)] * 5
    assert pool.asked == [f"/v1/accepted/{submission(1)}"]


def test_what_the_fetching_raises_ends_the_wait_on_all_ranks(tmp_path: Path) -> None:
    class Gone(Pool):
        def get(self, path: str, kind: Any) -> Any:
            raise ShoalError("the coordinator is gone")

    class Told(Ranks):
        sent: list[bytes] = []

        def broadcast(self, message: bytes | None) -> bytes:
            self.sent.append(message or b"")
            return b""

    prefetch = Prefetch(1, Gone(), run_config(2, {}), tmp_path)  # type: ignore[arg-type]
    prefetch.start()
    ranks = Told(0, 2)
    incoming = Incoming(1, Pool(), ranks, run_config(2, {}), tmp_path, prefetch)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as wait, pytest.raises(ShoalError, match="is gone"):
        wait.submit(incoming.more, threading.Event(), at_once=False).result(60)
    assert ranks.sent == [b""]
