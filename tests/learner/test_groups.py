"""What the learner takes in: files checked again, groups whole and young enough; a broken file is put aside."""

import logging
from pathlib import Path

import pytest

from shoal.config import parse
from shoal.learner.groups import BatchError, Fetched, Group, decode, encode, fetch
from shoal.protocol.messages import Batch, BatchGroup
from shoal.store.rollouts import AcceptedRollout

from .support import STRANGER, Store, accepted, rollouts, submission

G = 2
CONFIG = parse(
    {
        "sampling": {"group_size": G, "max_tokens": 8},
        "workers": {"groups_per_submission": 3},
        "coordinator": {"async_level": 2},
        "learner": {"row_tokens": 32},
    }
)


@pytest.fixture
def aside(tmp_path: Path) -> Path:
    """Where files that break the schema go; it is made when the first comes."""
    return tmp_path / "quarantine"


def fetched(store: Store, aside: Path, *members: tuple[int, int], step: int = 4) -> Fetched:
    groups = [BatchGroup(submission=submission(number), group=group) for number, group in members]
    batch = Batch(step=step, ready=True, have=len(groups), need=len(groups), groups=groups)
    return fetch(store, batch, CONFIG, aside)  # type: ignore[arg-type]


def changed(data: bytes) -> bytes:
    found = bytearray(data)
    found[len(found) // 3] ^= 1
    return bytes(found)


def test_the_run_is_asked_once_who_may_validate(aside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = Store(accepted(), accepted()), []
    told = store.descriptor()
    monkeypatch.setattr(store, "descriptor", lambda: asked.append(1) or told)
    fetched(store, aside, (0, 2), (1, 0), (0, 0))
    assert len(asked) == 1


def test_groups_come_as_the_batch_names_them(aside: Path) -> None:
    store = Store(accepted(), accepted(version=3))
    found = fetched(store, aside, (0, 2), (1, 0), (0, 0))
    assert (found.refused, found.quarantined) == (0, 0) and not aside.exists()
    assert [(group.submission, group.policy_version) for group in found.groups] == [
        (submission(0), 4),
        (submission(1), 3),
        (submission(0), 4),
    ]
    assert found.groups[0] == Group(
        submission(0), 4, [6, 5], [[30, 2], [31, 2]], [[-0.5, -0.25], [-0.5, -0.25]], [0.0, 1.0]
    )
    assert found.groups[0].n_tokens == 4
    assert len(store.asked) == 2  # each file once


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (accepted(by=STRANGER), "is no validator of this run"),
        (accepted(run="other"), "is of run other"),
        (accepted(version=5), "version 5"),
        (accepted(rows=rollouts()[:-1]), "has no whole group 2"),
        (accepted(rows=rollouts()[1:]), "has no whole group 2"),
        (accepted(rows=rollouts(2)), "has no whole group 2"),
        (accepted(rows=[*rollouts()[:-1], AcceptedRollout(2, "1+1", [9], [1], [0.0], 1.0)]), "no whole group 2"),
    ],
    ids=["a worker's", "other run", "future", "cut off", "shifted", "missing", "two prompts"],
)
def test_a_file_that_must_not_be_trained_on_is_refused(data: bytes, message: str, aside: Path) -> None:
    with pytest.raises(BatchError, match=message):
        fetched(Store(data), aside, (0, 2))


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (changed(accepted()), ""),
        (b"", ""),
        (accepted(rows=rollouts(4)), "8 rows; between 1 and 6"),
    ],
    ids=["changed", "empty", "more rows than a submission holds"],
)
def test_a_file_that_breaks_the_schema_is_put_aside_and_the_others_are_taken(
    broken: bytes, why: str, aside: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(accepted(), broken)
    with caplog.at_level(logging.ERROR):
        found = fetched(store, aside, (1, 0), (0, 1), (1, 2))
    assert [group.submission for group in found.groups] == [submission(0)]
    assert (found.refused, found.quarantined) == (0, 2)  # groups, of one file that was asked for once
    assert len(store.asked) == 2
    assert [path.name for path in aside.iterdir()] == [f"{submission(1)}.parquet"]
    assert (aside / f"{submission(1)}.parquet").read_bytes() == broken
    [said] = caplog.messages
    assert submission(1) in said and str(aside) in said and why in said


def test_where_every_file_breaks_the_schema_nothing_is_trained_on(aside: Path) -> None:
    with pytest.raises(BatchError, match=f"step 4: nothing to train on; .* 2 are of files put aside in {aside}"):
        fetched(Store(b"", b"PAR1"), aside, (0, 0), (1, 0))
    assert len(list(aside.iterdir())) == 2


@pytest.mark.parametrize(("version", "taken"), [(4, 1), (2, 1), (1, 0), (0, 0)])
def test_a_group_beyond_the_async_level_is_counted_and_left_out(version: int, taken: int, aside: Path) -> None:
    found = fetched(Store(accepted(version=version), accepted()), aside, (0, 0), (1, 0))
    assert (len(found.groups), found.refused) == (1 + taken, 1 - taken)


def test_a_batch_of_nothing_but_old_groups_is_refused(aside: Path) -> None:
    with pytest.raises(BatchError, match="step 4: nothing to train on; 2 groups are older than 2 versions"):
        fetched(Store(accepted(version=1)), aside, (0, 0), (0, 1))


def test_a_batch_of_no_groups_is_refused(aside: Path) -> None:
    with pytest.raises(BatchError):
        fetched(Store(), aside)


def test_groups_survive_the_way_to_other_ranks_exactly() -> None:
    groups = [
        Group("s", 3, [1, 2], [[3], []], [[-1 / 3], []], [0.1, 1e-30]),
        Group("t", 0, [1], [[2]], [[-0.0]], [1.0]),
    ]
    assert decode(encode(groups)) == groups
