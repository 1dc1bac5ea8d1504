import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.messages import Assignment, Claim, ContentOwner, HeartbeatAnswer, Ok, Reason, Stored, Verdict
from shoal.node import RefusedError
from shoal.rollout.worker import Worker
from shoal.store.rollouts import Rollout, read_accepted
from shoal.validator.service import Validator

from ..workers import ALICE, GROUPS, RUN, VALIDATOR
from .support import (
    ASKED,
    GROUP_SIZE,
    MAX_TOKENS,
    SETTINGS,
    ValidatorsNode,
    config,
    make_validator,
    make_worker,
    signed,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def file(worker: Worker, honest: list[Rollout]) -> bytes:
    return signed(worker, ASKED, honest)


@pytest.fixture
def modelless() -> Iterator[Validator]:
    """A validator that must not load weights: it has none, and nobody to ask for them."""
    validator = Validator(ValidatorsNode(), SETTINGS, Path("/nowhere"), "", "float32")  # type: ignore[arg-type]
    with validator.quarantine:
        yield validator


def claim(asked: Assignment = ASKED) -> Claim:
    return Claim(assignment=asked, worker=ALICE.public, lease_s=0.0)


# --- unreadable ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"PAR1", random.Random(0).randbytes(5_000), b"PAR1" + b"\x00" * 99 + b"PAR1"])
def test_what_is_no_rollout_file_is_unreadable(modelless: Validator, data: bytes) -> None:
    verdict, accepted = modelless.check(claim(), data)
    assert (verdict.reason, accepted, verdict.content) == (Reason.UNREADABLE, None, None)
    assert modelless.model is None


def test_a_truncated_file_is_unreadable(modelless: Validator, file: bytes) -> None:
    for cut in range(0, len(file), len(file) // 20):
        assert modelless.check(claim(), file[:cut])[0].reason is Reason.UNREADABLE


def test_more_rows_than_were_asked_for_are_unreadable(
    modelless: Validator, worker: Worker, honest: list[Rollout]
) -> None:
    verdict, _ = modelless.check(claim(), signed(worker, ASKED, [*honest, honest[0]]))
    assert verdict.reason is Reason.UNREADABLE and "9 rows" in verdict.detail


def test_no_rows_are_unreadable(modelless: Validator, worker: Worker) -> None:
    assert modelless.check(claim(), signed(worker, ASKED, []))[0].reason is Reason.UNREADABLE


def test_a_completion_beyond_the_limit_is_unreadable(
    modelless: Validator, worker: Worker, honest: list[Rollout]
) -> None:
    longer = [Rollout(**vars(row) | {"tokens": row.tokens + [5] * MAX_TOKENS}) for row in honest]
    verdict, _ = modelless.check(claim(), signed(worker, ASKED, longer))
    assert verdict.reason is Reason.UNREADABLE


def test_text_that_is_no_utf8_is_unreadable_and_no_exception(modelless: Validator, worker: Worker) -> None:
    """Parquet does not check it; a validator that dies of it would claim the same file again for ever."""
    row = Rollout(0, "\x01\x02\x03\x04 task", 0, 1, [5], [-1.0], 0.0, [bytes(258)])
    data = signed(worker, ASKED, [row])
    at = data.find(b"\x01\x02\x03\x04 task")
    assert at > 0, "short pages are stored as they are"
    verdict, _ = modelless.check(claim(), data[:at] + b"\xff\xfe\xfd\xfc" + data[at + 4 :])
    assert verdict.reason is Reason.UNREADABLE


def test_any_damage_is_a_verdict_and_no_exception(modelless: Validator, file: bytes) -> None:
    rng = random.Random(1)
    for _ in range(150):
        damaged = bytearray(file)
        for _ in range(rng.choice([1, 1, 3, 20])):
            damaged[rng.randrange(len(file))] = rng.randrange(256)
        if bytes(damaged) == file:
            continue
        try:
            verdict, _ = modelless.check(claim(), bytes(damaged))
        except AttributeError:  # it wanted weights: what was damaged carries no meaning
            continue
        assert verdict.reason in (Reason.UNREADABLE, Reason.SIGNATURE)


def test_a_file_that_kills_its_reader_is_unreadable(modelless: Validator, file: bytes) -> None:
    modelless.check(claim(), b"")
    assert modelless.quarantine.child is not None
    os.kill(modelless.quarantine.child.pid, signal.SIGABRT)
    verdict, accepted = modelless.check(claim(), file)
    assert (verdict.reason, verdict.detail, accepted) == (Reason.UNREADABLE, "ends its reader: SIGABRT", None)


# --- accepted --------------------------------------------------------------------------------------------------------


def test_the_accepted_file_holds_what_the_validator_found(
    tiny_folder: Path, worker: Worker, honest: list[Rollout]
) -> None:
    validator = make_validator(tiny_folder, SETTINGS)
    claimed = [Rollout(**vars(row) | {"logprobs": [p - 0.01 for p in row.logprobs]}) for row in honest]
    claimed = [Rollout(**vars(row) | {"reward": row.reward + 0.00005}) for row in claimed]
    verdict, data = validator.check(claim(), signed(worker, ASKED, claimed))
    assert verdict.reason is None and data is not None
    accepted = read_accepted(data, max_rows=GROUPS * GROUP_SIZE, max_tokens=SETTINGS.learner.row_tokens)
    for found, true in zip(accepted.rows, honest, strict=True):
        assert (found.group, found.task, found.tokens) == (true.group, true.task, true.tokens)
        assert found.logprobs == pytest.approx(true.logprobs, abs=1e-4), "its own, not the worker's"
        assert found.reward == pytest.approx(true.reward, abs=1e-6), "its own, not the worker's"
        assert found.prompt == worker._prompt(worker.plan(ASKED)[found.group])
    header = accepted.header
    assert (header.run, header.step, header.policy_version, header.policy_digest, header.submission) == (
        RUN,
        ASKED.step,
        ASKED.policy_version,
        ASKED.policy_digest,
        ASKED.number,
    )
    assert (header.worker, header.signer) == (ALICE.public, VALIDATOR.public)


def test_the_verdict_tells_of_every_group(tiny_folder: Path, honest: list[Rollout], file: bytes) -> None:
    verdict, _ = make_validator(tiny_folder, SETTINGS).check(claim(), file)
    assert [group.tokens for group in verdict.groups] == [
        sum(len(row.tokens) for row in honest if row.group == number) for number in range(GROUPS)
    ]
    for number, group in enumerate(verdict.groups):
        rewards = {round(row.reward, 5) for row in honest if row.group == number}
        assert group.useful == (len(rewards) > 1)
        mean = sum(row.reward for row in honest if row.group == number) / GROUP_SIZE
        assert group.reward_mean == pytest.approx(mean, abs=1e-6)


def test_a_group_whose_rewards_are_equal_is_of_no_use(tiny_folder: Path) -> None:
    settings = config(tasks={"length_targets": []})  # nothing but right or wrong, and a random model is wrong
    worker = make_worker(tiny_folder, settings)
    verdict, data = make_validator(tiny_folder, settings).check(claim(), signed(worker, ASKED, worker.generate(ASKED)))
    assert [group.useful for group in verdict.groups] == [False, False]
    assert data is not None


def test_a_rejected_file_yields_no_accepted_one(tiny_folder: Path, worker: Worker, honest: list[Rollout]) -> None:
    forged = [Rollout(**vars(row) | {"reward": 1.0}) for row in honest]
    verdict, data = make_validator(tiny_folder, SETTINGS).check(claim(), signed(worker, ASKED, forged))
    assert data is None and verdict.groups == [] and verdict.content is not None


# --- the loop --------------------------------------------------------------------------------------------------------


class ScriptedNode(ValidatorsNode):
    """Hands out one claim, then says that the run is over."""

    answer: HeartbeatAnswer | None = None
    claims: list[Claim]
    said: list[Verdict]
    upload: bytes
    refusal: RefusedError | None = None

    def ask(self, path: str, answer: type[Claim]) -> Claim | None:
        if self.claims:
            return self.claims.pop()
        self.answer = HeartbeatAnswer(state="finished", newest_version=2, relays=[])
        return None

    def get_bytes(self, path: str) -> bytes:
        assert path == f"/v1/submissions/{ASKED.id}"
        return self.upload

    def put(self, path: str, data: bytes, answer: Any) -> Any:
        super().put(path, data, answer)
        if self.refusal is not None:
            raise self.refusal
        return Stored(size_bytes=len(data), hash="7" * 64)

    def post(self, path: str, message: Verdict, answer: type[Ok]) -> Ok:
        self.said.append(message)
        return Ok()


def scripted(tiny_folder: Path, upload: bytes, refusal: RefusedError | None = None) -> tuple[Validator, ScriptedNode]:
    validator = make_validator(tiny_folder, SETTINGS)
    node = ScriptedNode(policy_version=2)
    node.claims, node.said, node.upload, node.refusal = [claim()], [], upload, refusal
    validator.node = node  # type: ignore[assignment]
    return validator, node


def test_the_loop_checks_what_it_claims_and_ends_with_the_run(tiny_folder: Path, file: bytes) -> None:
    validator, node = scripted(tiny_folder, file)
    assert validator.run(threading.Event()) == "finished"
    (said,) = node.said
    assert said.reason is None and said.accepted_hash == "7" * 64
    assert len(node.uploads) == 1
    assert node.tokens == sum(group.tokens for group in said.groups)


def test_a_rejection_stores_no_file(tiny_folder: Path) -> None:
    validator, node = scripted(tiny_folder, b"nonsense")
    assert validator.run(threading.Event()) == "finished"
    assert [said.reason for said in node.said] == [Reason.UNREADABLE] and node.uploads == {}


def test_a_claim_that_was_lost_is_let_go(tiny_folder: Path, file: bytes) -> None:
    validator, node = scripted(tiny_folder, file, RefusedError("accepted and not claimed", 409))
    assert validator.run(threading.Event()) == "finished"
    assert node.said == []


def test_any_other_refusal_is_an_error(tiny_folder: Path, file: bytes) -> None:
    validator, _ = scripted(tiny_folder, file, RefusedError("only validator may ask", 403))
    with pytest.raises(RefusedError):
        validator.run(threading.Event())


def test_a_stopped_validator_claims_nothing(tiny_folder: Path, file: bytes) -> None:
    validator, node = scripted(tiny_folder, file)
    stop = threading.Event()
    stop.set()
    assert validator.run(stop) == "stopped" and len(node.claims) == 1


def test_what_is_accepted_does_not_depend_on_how_the_prefill_is_packed(tiny_folder: Path, file: bytes) -> None:
    found = []
    for row_tokens in (60, 128, 4096):
        verdict, data = make_validator(tiny_folder, config(validator={"row_tokens": row_tokens})).check(claim(), file)
        assert verdict.reason is None and data is not None
        rows = read_accepted(data, max_rows=8, max_tokens=SETTINGS.learner.row_tokens).rows
        found.append(torch.tensor([logprob for row in rows for logprob in row.logprobs]))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(found[0], found[2], atol=1e-4, rtol=0)


def test_nobody_is_asked_who_owns_an_unreadable_file(modelless: Validator) -> None:
    def fail(path: str, answer: type[ContentOwner]) -> ContentOwner:
        raise AssertionError(path)

    modelless.node.get = fail  # type: ignore[assignment, method-assign]
    assert modelless.check(claim(), b"x")[0].reason is Reason.UNREADABLE
