"""The learner accepts only signed, complete, recent and plausible groups, and quarantines malformed files."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.config import parse
from shoal.learner.groups import Fetched, Gathering, Group, Outline, decode, encode, gathering, validators
from shoal.protocol.calling import RefusedError
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
def quarantine(tmp_path) -> Path:
    """The folder for files that break the schema. It is created when first needed."""
    return tmp_path / "quarantine"


def fetched(store: Store, quarantine: Path, *members: tuple[int, int], step: int = 4) -> Fetched:
    groups = [BatchGroup(submission=submission(number), group=group) for number, group in members]
    batch = Batch(step=step, ready=True, groups=groups)
    files: Gathering = gathering(store, CONFIG, quarantine)  # type: ignore[arg-type]
    return files.gather(batch, validators(store))  # type: ignore[arg-type]


def changed(data: bytes) -> bytes:
    """Change the nonce in the header, so that the signature no longer matches."""
    return data.replace(b"0" * 32 + b'"', b"1" * 32 + b'"')


def test_the_validators_keys_are_requested_once_per_batch(quarantine, monkeypatch):
    store, requests = Store(accepted(), accepted(1)), []
    descriptor = store.descriptor()
    monkeypatch.setattr(store, "descriptor", lambda: requests.append(1) or descriptor)
    fetched(store, quarantine, (0, 2), (1, 0), (0, 0))
    assert len(requests) == 1


def test_groups_are_in_the_order_of_the_batch_and_each_file_is_read_once(quarantine):
    store = Store(accepted(), accepted(1, version=3))
    result = fetched(store, quarantine, (0, 2), (1, 0), (0, 0))
    assert (result.refused, result.quarantined) == (0, 0) and not quarantine.exists()
    assert [(group.submission, group.policy_version) for group in result.groups] == [
        (submission(0), 4),
        (submission(1), 3),
        (submission(0), 4),
    ]
    first = result.groups[0]
    assert first.outline == Outline(submission(0), 2, 4, 2, [2, 2], [0.0, 1.0], [[], []]) and first.n_tokens == 4
    assert [list(part) for part in (first.prompt, *first.completions)] == [[6, 5], [30, 2], [31, 2]]
    assert [list(part) for part in first.behaviour] == [[-0.5, -0.25]] * 2
    assert len(store.requests) == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (accepted(by=STRANGER), "is not a validator of this run"),
        (accepted(run="other"), "belongs to run other"),
        (accepted(version=5), "version 5"),
        (accepted(rows=rollouts()[:-1]), "has no whole group 2"),
        (accepted(rows=rollouts()[1:]), "has no whole group 2"),
        (accepted(rows=rollouts(2)), "has no whole group 2"),
        (accepted(rows=[*rollouts()[:-1], AcceptedRollout(2, "1+1", [9], [1], [0.0], 1.0)]), "no whole group 2"),
        (accepted(rows=[replace(row, tokens=[], logprobs=[]) for row in rollouts()]), "a completion is empty"),
        (accepted(rows=[replace(row, prompt=[]) for row in rollouts()]), "a prompt or a completion is empty"),
    ],
    ids=[
        *("a worker's", "other run", "future", "cut off", "shifted", "missing", "two prompts"),
        *("no completion", "no prompt"),
    ],
)
def test_a_group_by_another_signer_or_of_another_run_or_version_or_incomplete_is_left_out(
    data, message, quarantine, caplog
):
    """Such a group must not stop the learner, because a restarted learner gets the same batch again."""
    result = fetched(Store(data, accepted(1)), quarantine, (0, 2), (1, 0))
    assert ([group.submission for group in result.groups], result.foreign) == ([submission(1)], 1)
    assert re.search(message, caplog.text)


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        (accepted(0), f"its file is that of submission {submission(0)}"),
        (accepted(1, worker="b" * 64), f"its file is that of submission {'b' * 16}-000001"),
        (accepted(1, rows=rollouts(task="0+1")), f"its file has the rows of submission {submission(0)}"),
    ],
    ids=["same header", "another worker", "same rows"],
)
def test_a_validator_cannot_let_a_group_train_twice(copy, message, quarantine, caplog):
    result = fetched(Store(accepted(0), copy, accepted(2)), quarantine, (0, 1), (1, 1), (2, 1))
    assert ([group.submission for group in result.groups], result.foreign) == ([submission(0), submission(2)], 1)
    assert message in caplog.text


@pytest.mark.parametrize(
    ("broken", "why"),
    [(changed(accepted()), ""), (b"", ""), (accepted(rows=rollouts(25)), "50 rows; between 1 and 48")],
    ids=["changed", "empty", "more rows than a submission holds"],
)
def test_a_file_that_breaks_the_schema_is_quarantined(broken, why, quarantine, caplog):
    store = Store(accepted(), broken)
    with caplog.at_level(logging.ERROR):
        result = fetched(store, quarantine, (1, 0), (0, 1), (1, 2))
    assert [group.submission for group in result.groups] == [submission(0)]
    assert (result.refused, result.quarantined) == (0, 2)  # two groups of one file, which was fetched once
    assert len(store.requests) == 2
    assert [path.name for path in quarantine.iterdir()] == [f"{submission(1)}.parquet"]
    assert (quarantine / f"{submission(1)}.parquet").read_bytes() == broken
    [line] = caplog.messages
    assert submission(1) in line and str(quarantine) in line and why in line


def test_a_file_that_is_damaged_in_the_store_costs_its_groups_alone(quarantine, monkeypatch, caplog):
    store, status = Store(accepted(), accepted(1)), 410
    fetch = store.fetch_file

    def damaged(path: str, *, max_bytes: int) -> bytes:
        if path.endswith(submission(1)):
            raise RefusedError("the file was changed on disk", status)
        return fetch(path, max_bytes=max_bytes)

    monkeypatch.setattr(store, "fetch_file", damaged)
    with caplog.at_level(logging.ERROR):
        result = fetched(store, quarantine, (1, 0), (0, 1))
    assert [group.submission for group in result.groups] == [submission(0)] and result.quarantined == 1
    assert caplog.messages == [f"the step continues without {submission(1)}: the file was changed on disk"]
    status = 507
    with pytest.raises(RefusedError):
        fetched(store, quarantine, (1, 0))


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([b"", b"PAR1"], "2 are in damaged files"),
        ([accepted(version=1), accepted(1, version=1)], "2 are too old"),
    ],
    ids=["broken", "old"],
)
def test_an_empty_batch_says_why_its_groups_were_left_out(files, why, quarantine):
    result = fetched(Store(*files), quarantine, (0, 0), (1, 0))
    assert not result.groups and why in result.left_out


@pytest.mark.parametrize(("version", "taken"), [(4, 1), (2, 1), (1, 0), (0, 0)])
def test_a_group_beyond_the_async_level_is_counted_and_left_out(version, taken, quarantine):
    result = fetched(Store(accepted(version=version), accepted(1)), quarantine, (0, 0), (1, 0))
    assert (len(result.groups), result.refused) == (1 + taken, 1 - taken)


def conversation(**changed: Any) -> AcceptedRollout:
    """Make a rollout of group 1 in several turns, with two environment tokens."""
    return replace(rollouts()[3], **{"tokens": [10, 2, 8, 9, 11, 2], "logprobs": [-0.5] * 4, "turns": [2, 2]} | changed)


IMPOSSIBLE = [-9999.0, -50.5, 0.00390625, 0.5, float("nan"), float("-inf")]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        *((replace(rollouts()[3], logprobs=[-0.5, x]), f"a logprob of {x:g} is outside [-50, 0]") for x in IMPOSSIBLE),
        *((replace(rollouts()[3], reward=x), "") for x in (float("nan"), float("inf"), 1e30, -1e30)),
        (conversation(turns=[]), "there are 4 logprobs for 6 sampled tokens"),
        (conversation(turns=[2, 1]), "there are 4 logprobs for 5 sampled tokens"),
        (conversation(logprobs=[-0.5] * 6), "there are 6 logprobs for 4 sampled tokens"),
    ],
)
def test_a_group_with_an_impossible_reward_or_logprob_is_counted_and_left_out(row, why, quarantine, caplog):
    rows = rollouts()
    rows[3] = row
    result = fetched(Store(accepted(rows=rows)), quarantine, (0, 0), (0, 1), (0, 2))
    assert ([group.prompt[0] for group in result.groups], result.implausible) == ([4, 6], 1)
    [line] = caplog.messages
    assert line.startswith(f"group 1 of {submission(0)} is left out: ") and why in line


def test_unchecked_logprobs_may_have_any_value_because_they_are_not_used(quarantine):
    """If such groups were refused, a worker could empty the batch."""
    rows = [replace(row, logprobs=[-9999.0, float("nan")]) for row in rollouts()]
    result = fetched(Store(accepted(rows=rows, prefilled=False)), quarantine, (0, 0), (0, 1))
    assert [group.checked for group in result.groups] == [False, False] and result.implausible == 0


@pytest.mark.parametrize("logprob", [-50.0, 0.0, 0.0009765625])
def test_a_logprob_within_rounding_of_the_bounds_is_accepted(logprob, quarantine):
    rows = rollouts()
    rows[3] = replace(rows[3], logprobs=[-0.5, logprob])
    assert fetched(Store(accepted(rows=rows)), quarantine, (0, 1)).implausible == 0


def test_a_prompt_may_be_longer_than_any_completion(quarantine):
    prompt = [7] * (CONFIG.sampling.max_tokens + 1)
    rows = [replace(row, prompt=prompt) for row in rollouts()]
    [group] = fetched(Store(accepted(rows=rows)), quarantine, (0, 1)).groups
    assert list(group.prompt) == prompt


def test_outlines_are_encoded_exactly():
    groups = [
        Group("s", 3, [1, 2], [[3], []], [[-1 / 3], []], [0.1, 1e-30]),
        Group("t", 0, [1], [[2]], [[-0.0]], [1.0], checked=False, number=2),
        Group("u", 3, [1, 2], [[3, 4, 5], [6]], [[-0.5, -1.0], [-0.25]], [0.1, 1.0], [[1, 1], []]),
    ]
    result = decode(encode(groups))
    assert result == [group.outline for group in groups]
    assert [outline.trained for outline in result] == [group.trained for group in groups] == [[1, 0], [1], [2, 1]]


def test_a_groups_arrays_are_views_of_its_file(quarantine):
    """A view uses no memory beyond that of the file, which holds 8 bytes per token (an int32 and a float32)."""
    [group] = fetched(Store(accepted()), quarantine, (0, 1)).groups
    assert [(array.dtype, array.base is not None) for array in (group.prompt, *group.completions)] == [
        (np.int32, True)
    ] * 3
    assert [(array.dtype, array.base is not None) for array in group.behaviour] == [(np.float32, True)] * 2


def test_a_group_keeps_its_turns(quarantine):
    rows = rollouts()
    rows[3] = conversation()
    [group] = fetched(Store(accepted(rows=rows)), quarantine, (0, 1)).groups
    assert group.turns == [[], [2, 2]] and group.trained == [2, 4] and group.n_tokens == 6


@pytest.mark.parametrize("turns", [[2, 4], [2], [-2, 2], [2**31 - 1] * 2])
def test_a_file_with_turns_that_do_not_fit_is_quarantined(turns, quarantine, caplog):
    rows = rollouts()
    rows[3] = replace(conversation(), turns=turns)
    result = fetched(Store(accepted(rows=rows)), quarantine, (0, 0), (0, 1))
    assert (result.groups, result.quarantined) == ([], 2)
    assert f"turns of {turns} do not fit 6 tokens" in caplog.text
