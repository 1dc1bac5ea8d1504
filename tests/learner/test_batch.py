"""What the learner takes in: files checked again, groups whole and young enough, and each of their tokens once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.config import Config, parse
from shoal.learner.batch import BatchError, Group, fetch, micro_batches
from shoal.messages import Batch, BatchGroup
from shoal.model.tree import forward_hidden
from shoal.pool.identity import Identity
from shoal.store.rollouts import SCHEMA_VERSION, AcceptedRollout, Header, RolloutFileError, write_accepted

VALIDATOR, STRANGER = Identity.generate(), Identity.generate()
G = 2
CONFIG = parse(
    {
        "sampling": {"group_size": G, "max_tokens": 8},
        "workers": {"groups_per_submission": 3},
        "coordinator": {"async_level": 2},
        "learner": {"row_tokens": 32},
    }
)


def submission(number: int) -> str:
    return f"{'a' * 16}-{number:06d}"


def rollouts(groups: int = 3) -> list[AcceptedRollout]:
    return [
        AcceptedRollout(group, "1+1", [group, 1], [10 * group + i, 2], [-0.5, -0.25], float(i))
        for group in range(groups)
        for i in range(G)
    ]


def accepted(
    *, version: int = 4, run: str = "run", rows: list[AcceptedRollout] | None = None, by: Identity = VALIDATOR
) -> bytes:
    header = Header(
        schema_version=SCHEMA_VERSION,
        run=run,
        step=4,
        policy_version=version,
        policy_digest="0" * 64,
        worker="1" * 64,
        submission=0,
        signer=by.public,
    )
    return write_accepted(header, rollouts() if rows is None else rows, by)


class Store:
    """A node that is asked for accepted files, and for who may sign them."""

    def __init__(self, *files: bytes) -> None:
        self.files = {f"/v1/accepted/{submission(i)}": data for i, data in enumerate(files)}
        self.invite = SimpleNamespace(run="run")
        self.asked: list[str] = []

    def descriptor(self) -> Any:
        return SimpleNamespace(keys={"validator": [VALIDATOR.public], "worker": [STRANGER.public]})

    def get_bytes(self, path: str) -> bytes:
        self.asked.append(path)
        return self.files[path]


def fetched(store: Any, *members: tuple[int, int], step: int = 4, config: Config = CONFIG) -> tuple[list[Group], int]:
    groups = [BatchGroup(submission=submission(number), group=group) for number, group in members]
    return fetch(store, Batch(step=step, ready=True, have=len(groups), need=len(groups), groups=groups), config)


# --- fetch --------------------------------------------------------------------------------------------------


def test_groups_come_as_the_batch_names_them() -> None:
    store = Store(accepted(), accepted(version=3))
    groups, refused = fetched(store, (0, 2), (1, 0), (0, 0))
    assert refused == 0
    assert [(group.submission, group.policy_version) for group in groups] == [
        (submission(0), 4),
        (submission(1), 3),
        (submission(0), 4),
    ]
    assert groups[0] == Group(submission(0), 4, [2, 1], [[20, 2], [21, 2]], [[-0.5, -0.25], [-0.5, -0.25]], [0.0, 1.0])
    assert groups[0].n_tokens == 4
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
def test_a_file_that_must_not_be_trained_on_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        fetched(Store(data), (0, 2))


def test_a_file_that_was_changed_is_refused() -> None:
    data = bytearray(accepted())
    data[len(data) // 3] ^= 1
    with pytest.raises(RolloutFileError):
        fetched(Store(bytes(data)), (0, 0))


def test_a_file_with_more_rows_than_a_submission_may_hold_is_refused() -> None:
    with pytest.raises(RolloutFileError, match="8 rows; between 1 and 6"):
        fetched(Store(accepted(rows=rollouts(4))), (0, 0))


@pytest.mark.parametrize(("version", "taken"), [(4, 1), (2, 1), (1, 0), (0, 0)])
def test_a_group_beyond_the_async_level_is_counted_and_left_out(version: int, taken: int) -> None:
    groups, refused = fetched(Store(accepted(version=version), accepted()), (0, 0), (1, 0))
    assert (len(groups), refused) == (1 + taken, 1 - taken)


def test_a_batch_of_nothing_but_old_groups_is_refused() -> None:
    with pytest.raises(BatchError, match="step 4: every group is older than 2 versions"):
        fetched(Store(accepted(version=1)), (0, 0), (0, 1))


def test_a_batch_of_no_groups_is_refused() -> None:
    with pytest.raises(BatchError):
        fetched(Store())


# --- micro-batches ------------------------------------------------------------------------------------------


def group(first: int, lengths: list[int], rewards: list[float]) -> Group:
    """Completions of tokens that come nowhere else, with logprobs that say which token they are of."""
    completions, at = [], first
    for length in lengths:
        completions.append(list(range(at, at + length)))
        at += length
    behaviour = [[-float(token) for token in tokens] for tokens in completions]
    return Group(f"s{first}", 0, [1, 2, 3], completions, behaviour, rewards)


GROUPS = [
    group(100, [4, 5, 6, 7], [0.0, 1.0, 1.0, 0.0]),
    group(200, [12, 1, 12, 12], [1.0, 0.0, 0.0, 0.0]),  # 40 tokens: more than a row
    group(300, [0, 2], [0.0, 1.0]),
    group(400, [3, 3], [0.25, 0.75]),
]


def packed(row_tokens: int = 20, rows: int = 2, normalize_std: bool = False) -> list[Any]:
    return list(micro_batches(GROUPS, row_tokens=row_tokens, rows_per_microbatch=rows, normalize_std=normalize_std))


@pytest.mark.parametrize("row_tokens", [15, 20, 25, 64, 512])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_every_token_comes_once_with_its_own_logprob_and_advantage(row_tokens: int, rows: int) -> None:
    wanted = {}
    for one in GROUPS:
        mean = sum(one.rewards) / len(one.rewards)
        for tokens, reward in zip(one.completions, one.rewards, strict=True):
            wanted |= dict.fromkeys(tokens, reward - mean)
    found = [
        (int(token), float(behaviour), float(advantage))
        for micro in packed(row_tokens, rows)
        for token, behaviour, advantage in zip(micro.pack.target_N, micro.behaviour_N, micro.advantage_N, strict=True)
    ]
    assert sorted(token for token, _, _ in found) == sorted(wanted)
    assert all(behaviour == -token for token, behaviour, _ in found)
    assert all(advantage == pytest.approx(wanted[token]) for token, _, advantage in found)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_a_micro_batch_holds_no_more_rows_than_asked_nor_longer_ones(rows: int) -> None:
    shapes = [micro.pack.tokens_RT.shape for micro in packed(20, rows)]
    assert all(r <= rows and t <= 20 for r, t in shapes)
    assert len(packed(512, 1)) == 1


def test_a_group_split_over_rows_keeps_the_advantages_of_the_whole_group() -> None:
    found = {
        int(token): float(advantage)
        for micro in packed(row_tokens=15, rows=1)
        for token, advantage in zip(micro.pack.target_N, micro.advantage_N, strict=True)
    }
    assert {found[token] for token in GROUPS[1].completions[0]} == {0.75}
    assert {found[token] for tokens in GROUPS[1].completions[1:] for token in tokens} == {-0.25}


def test_advantages_are_normalised_where_asked_for() -> None:
    (micro,) = packed(row_tokens=512, rows=9, normalize_std=True)
    of_first = micro.advantage_N[: GROUPS[0].n_tokens]
    assert of_first.abs().tolist() == pytest.approx([1.0] * GROUPS[0].n_tokens, abs=1e-4)


def test_a_completion_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit a row of 14"):
        packed(row_tokens=14)


def test_the_predictor_of_a_token_is_the_token_before_it(tiny_model: Any) -> None:
    one = Group("s", 0, [5, 6], [[7, 8], [9]], [[0.0, 0.0], [0.0]], [0.0, 1.0])
    (micro,) = micro_batches([one], row_tokens=16, rows_per_microbatch=1, normalize_std=False)
    assert micro.pack.tokens_RT.flatten()[micro.pack.predictor_N].tolist() == [6, 7, 6]
    with torch.no_grad():
        assert forward_hidden(tiny_model, micro.pack).shape[0] == len(micro.behaviour_N) == 3
