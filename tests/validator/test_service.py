import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from blake3 import blake3

from shoal.ledger.chain import open_opinion
from shoal.protocol.calling import RefusedError
from shoal.protocol.messages import (
    Claim,
    ClaimRequest,
    Claims,
    HeartbeatAnswer,
    Ok,
    Reason,
    Stored,
    Verdict,
)
from shoal.shardcast.fetch import RefusedVersionError
from shoal.store.rollouts import Rollout, read_accepted
from shoal.tasks.prompt import ChatTemplateError
from shoal.validator.service import BATCH, Validator
from shoal.worker.produce import Producer

from ..store.support import never
from ..store.test_pages import BOMBS
from ..workers import ALICE, GROUPS, RUN, VALIDATOR, produced, signed
from .support import (
    ASSIGNMENT,
    GROUP_SIZE,
    MAX_TOKENS,
    SETTINGS,
    ValidatorsNode,
    assignment,
    checked,
    claim,
    config,
    judged,
    make_producer,
    make_validator,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def file(worker: Producer, honest: list[Rollout]) -> bytes:
    return signed(worker, ASSIGNMENT, honest)


@pytest.fixture
def modelless() -> Iterator[Validator]:
    """Yield a validator without weights or relays."""
    validator = Validator(ValidatorsNode(), SETTINGS, Path("/nowhere"), "", "float32")  # type: ignore[arg-type]
    with validator.judge:
        yield validator


# --- unreadable ------------------------------------------------------------------------------------------------------


def test_a_file_that_would_inflate_is_unreadable_and_no_process_decodes_it(
    modelless: Validator, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {fault: make() for fault, make in BOMBS.items()}
    checked(modelless, claim(), b"")
    child = modelless.judge.quarantine.child
    for decoder in ("ParquetFile", "read_table"):
        monkeypatch.setattr(pq, decoder, never)
    for fault, data in files.items():
        verdict, accepted = checked(modelless, claim(), data)
        assert verdict.reason is Reason.UNREADABLE and "column proofs" in verdict.detail and accepted is None, fault
    assert modelless.judge.quarantine.child is child is not None, "the child process must survive every file"


def test_an_honest_file_is_decoded_only_in_the_child_process(
    validator: Validator, file: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for decoder in ("ParquetFile", "read_table"):
        monkeypatch.setattr(pq, decoder, never)
    assert judged(validator, ASSIGNMENT, file).reason is None


@pytest.mark.parametrize("data", [b"", b"PAR1", random.Random(0).randbytes(5_000), b"PAR1" + b"\x00" * 99 + b"PAR1"])
def test_other_and_truncated_files_are_unreadable(modelless: Validator, file: bytes, data: bytes) -> None:
    verdict, accepted = checked(modelless, claim(), data)
    assert (verdict.reason, accepted, verdict.groups) == (Reason.UNREADABLE, None, ())
    assert modelless.judge.model is None
    for cut in range(0, len(file), len(file) // 20):
        assert checked(modelless, claim(), file[:cut])[0].reason is Reason.UNREADABLE


def test_a_file_with_too_many_rows_no_rows_or_too_long_rows_is_unreadable(
    modelless: Validator, worker: Producer, honest: list[Rollout]
) -> None:
    longer = [Rollout(**vars(row) | {"tokens": row.tokens + [5] * MAX_TOKENS}) for row in honest]
    for rows, words in (([*honest * 8, honest[0]], "65 rows"), ([], ""), (longer, "")):
        verdict, _ = checked(modelless, claim(), signed(worker, ASSIGNMENT, rows))
        assert verdict.reason is Reason.UNREADABLE and words in verdict.detail


# --- accepted --------------------------------------------------------------------------------------------------------


def test_the_accepted_file_has_the_validators_own_results(
    tiny_folder: Path, worker: Producer, honest: list[Rollout]
) -> None:
    validator = make_validator(tiny_folder, SETTINGS)
    claimed = [Rollout(**vars(row) | {"logprobs": [p - 0.01 for p in row.logprobs]}) for row in honest]
    verdict, data = checked(validator, claim(), signed(worker, ASSIGNMENT, claimed))
    assert verdict.reason is None and data is not None
    accepted = read_accepted(data, max_rows=GROUPS * GROUP_SIZE, max_tokens=SETTINGS.learner.row_tokens)
    for row, true in zip(accepted.rows, honest, strict=True):
        task = worker.tasks.train[worker.plan(ASSIGNMENT)[row.group].task_index]
        assert (row.group, row.task, row.tokens) == (true.group, task.id, true.tokens)
        assert row.logprobs == pytest.approx(true.logprobs, abs=1e-4)
        assert row.prompt == worker.prompt(worker.plan(ASSIGNMENT)[row.group])
    header = accepted.header
    assert (header.run, header.step, header.policy_version, header.policy_digest, header.submission) == (
        RUN,
        ASSIGNMENT.step,
        ASSIGNMENT.policy_version,
        ASSIGNMENT.policy_digest,
        ASSIGNMENT.number,
    )
    assert (header.worker, header.signer) == (ALICE.public, VALIDATOR.public)


def test_the_verdict_describes_every_group(tiny_folder: Path, honest: list[Rollout], file: bytes) -> None:
    verdict, accepted = checked(make_validator(tiny_folder, SETTINGS), claim(), file)
    rows = read_accepted(accepted or b"", max_rows=GROUPS * GROUP_SIZE, max_tokens=SETTINGS.learner.row_tokens).rows
    assert [group.tokens for group in verdict.groups] == [
        sum(len(row.tokens) for row in honest if row.group == number) for number in range(GROUPS)
    ]
    for number, group in enumerate(verdict.groups):
        rewards = {round(row.reward, 5) for row in rows if row.group == number}
        assert group.useful == (len(rewards) > 1)
        mean = sum(row.reward for row in rows if row.group == number) / GROUP_SIZE
        assert group.reward_mean == pytest.approx(mean, abs=1e-6)


def test_a_group_with_equal_rewards_is_not_useful(tiny_folder: Path) -> None:
    settings = config(tasks={"length_targets": []})  # without length targets, all rewards of a random model are 0
    worker = make_producer(tiny_folder, settings)
    verdict, data = checked(make_validator(tiny_folder, settings), claim(), worker.submission(ASSIGNMENT))
    assert [group.useful for group in verdict.groups] == [False, False]
    assert data is not None


# --- the loop --------------------------------------------------------------------------------------------------------


class ScriptedNode(ValidatorsNode):
    """Grants its claims at once, then reports the end of the run."""

    answer: HeartbeatAnswer | None = None
    claims: list[Claim]
    limits: list[int]
    verdicts: list[Verdict]
    refusal: RefusedError | None = None
    refusals: list[int]  # versions

    def refuse(self, version: int, error: Exception) -> None:
        self.refusals.append(version)

    def pause_s(self, min_s: float) -> float:
        return min_s

    def renewal(self) -> int | None:
        return None

    def send_file(self, path: str, data: bytes) -> Any:
        super().send_file(path, data)
        if self.refusal is not None:
            raise self.refusal
        return Stored(size_bytes=len(data), hash="7" * 64)

    def post(self, path: str, message: Any, answer: Any) -> Any:
        if isinstance(message, ClaimRequest):
            assert path == "/v1/claims" and answer is Claims
            self.limits.append(message.most)
            given, self.claims = self.claims, []
            if not given:
                self.answer = HeartbeatAnswer(state="finished", newest_version=2, relays=[])
            return Claims(claims=given)
        self.verdicts.append(message)
        return Ok()


def scripted(tiny_folder: Path, upload: bytes, refusal: RefusedError | None = None) -> tuple[Validator, ScriptedNode]:
    validator = make_validator(tiny_folder, SETTINGS)
    node = ScriptedNode(policy_version=2, files={ASSIGNMENT.id: upload})
    node.claims, node.limits, node.verdicts, node.refusal, node.refusals = [claim()], [], [], refusal, []
    validator.node = node  # type: ignore[assignment]
    return validator, node


def test_the_validator_checks_its_claims_and_ends_with_the_run(tiny_folder: Path, file: bytes) -> None:
    validator, node = scripted(tiny_folder, file)
    assert validator.run(threading.Event()) == "finished"
    (verdict,) = node.verdicts
    opinion = open_opinion(verdict.opinion, VALIDATOR.public)
    assert (opinion.run, opinion.submission, opinion.reason) == (RUN, ASSIGNMENT.id, None)
    assert (opinion.file, opinion.accepted) == (blake3(file).hexdigest(), "7" * 64)
    assert len(node.uploads) == 1
    assert node.tokens == sum(group.tokens for group in verdict.groups)


def test_the_newest_version_is_loaded_before_the_first_claim(
    tiny_folder: Path, file: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    validator, node = scripted(tiny_folder, file)
    loaded = []
    monkeypatch.setattr(validator, "load", lambda version, digest=None: loaded.append((version, digest)))
    node.policy_version = None
    for relays, newest in ((["http://relay"], None), ([], 3), (["http://relay"], 3)):
        node.answer = HeartbeatAnswer(state="running", newest_version=newest, relays=relays)
        validator.preload()
    assert loaded == [(3, None)]
    node.policy_version = 1
    validator.preload()
    assert loaded == [(3, None)], "no other version may be loaded before a claim needs it"


def test_each_of_several_claims_gets_its_own_verdict(tiny_folder: Path, worker: Producer, tiny_folders: Any) -> None:
    """A spot check detects other weights too. Honest work that passes a spot check keeps the worker's logprobs."""
    validator, node = scripted(tiny_folder, b"")
    given = [assignment(number) for number in range(5)]
    files = [worker.submission(given) for given in given]
    files[1] = b"nonsense"
    files[2] = signed(worker, given[2], [replace(row, seed=row.seed + 1) for row in produced(worker, given[2])])
    files[3] = make_producer(tiny_folders[1], SETTINGS).submission(given[3])
    node.files = {given.id: data for given, data in zip(given, files, strict=True)}
    node.claims = [claim(given, full=number != 4) for number, given in enumerate(given)]
    node.claims += [claim(given, full=False) for given in given[2:4]]
    assert validator.run(threading.Event()) == "finished"
    assert node.limits == [BATCH] * 2
    reasons = {0: None, 1: Reason.UNREADABLE, 2: Reason.TASKS, 3: Reason.PROOF, 4: None}
    opinions = [open_opinion(verdict.opinion, VALIDATOR.public) for verdict in node.verdicts]
    assert [(opinion.submission, opinion.reason) for opinion in opinions] == [
        (given[number].id, reasons[number]) for number in (0, 1, 2, 3, 4, 2, 3)
    ]
    assert [opinion.spent is None for opinion in opinions] == [False, *[True] * 6], (
        "only work that is accepted after a full check may report the tolerance it used"
    )
    assert set(node.uploads) == {f"/v1/accepted/{given[n].id}" for n in (0, 4)}
    for number in (0, 4):
        accepted = read_accepted(node.uploads[f"/v1/accepted/{given[number].id}"], max_rows=8, max_tokens=4096)
        assert accepted.header.submission == number
        own = produced(worker, given[number])
        assert [row.tokens for row in accepted.rows] == [row.tokens for row in own]
        assert ([row.logprobs for row in accepted.rows] == [row.logprobs for row in own]) == (number == 4)


def test_the_verdict_on_a_lost_claim_is_dropped_and_any_other_refusal_is_an_error(
    tiny_folder: Path, file: bytes
) -> None:
    validator, node = scripted(tiny_folder, file, RefusedError("accepted and not claimed", 409))
    assert validator.run(threading.Event()) == "finished"
    assert node.verdicts == []
    validator, _ = scripted(tiny_folder, file, RefusedError("only validator may ask", 403))
    with pytest.raises(RefusedError):
        validator.run(threading.Event())


def test_a_stopped_validator_claims_nothing(tiny_folder: Path, file: bytes) -> None:
    validator, node = scripted(tiny_folder, file)
    stop = threading.Event()
    stop.set()
    assert validator.run(stop) == "stopped" and len(node.claims) == 1


def test_a_file_that_the_coordinator_lost_does_not_end_the_validator(validator: Validator, file: bytes) -> None:
    lost = claim(assignment(number=1))
    validator.node.files[ASSIGNMENT.id] = file  # type: ignore[attr-defined]
    [result] = validator.check([lost, claim()])
    assert result.opinion.submission == ASSIGNMENT.id and result.reason is None
    assert validator.check([lost]) == []


def test_a_version_that_cannot_be_used_is_refused_and_the_loaded_one_stays(
    tiny_folder: Path, file: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    validator, node = scripted(tiny_folder, file)
    tried: list[int] = []

    def fetch(version: int, digest: str | None) -> Any:
        tried.append(version)
        raise RefusedVersionError(f"version {version} is refused: it holds 'tk.py'")

    monkeypatch.setattr(validator, "fetch", fetch)
    monkeypatch.setattr("shoal.validator.service.REFUSED_S", 0.0)
    before = validator.loaded
    bad = claim().model_copy(update={"assignment": claim().assignment.model_copy(update={"policy_version": 9})})
    node.claims = [bad]
    assert validator.run(threading.Event()) == "finished"
    assert not validator.load(9, bad.assignment.policy_digest)
    assert tried == [9] and node.refusals == [9] and node.verdicts == []
    assert validator.loaded == before and node.policy_version == 2


def test_a_template_that_fails_on_a_submission_costs_no_verdict(
    tiny_folder: Path, file: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    validator, node = scripted(tiny_folder, file)

    def check(claims: Any) -> Any:
        raise ChatTemplateError("it exceeds a limit")

    monkeypatch.setattr(validator, "check", check)
    assert validator.run(threading.Event()) == "finished"
    assert node.refusals == [2] and node.verdicts == [] and node.policy_version is None
