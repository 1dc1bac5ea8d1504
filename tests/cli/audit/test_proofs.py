"""The audit judges hard rejections and a sample of accepted files again, and compares what the learner reads of these.

A slash for an honest file is a broken link, and so is a false accepted file.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from shoal.cli.audit.pay import Accepted, AuditState, Rejected
from shoal.cli.audit.recompute import judge_again, judge_rejections
from shoal.cli.audit.run import BrokenError
from shoal.shardcast.manifest import version_name
from shoal.store.folder import Folder
from shoal.store.rollouts import AcceptedRollout, Header, read_accepted, read_submission, write_accepted
from shoal.tasks import Grade
from shoal.tasks.rewards import graders
from shoal.worker.produce import Producer

from ...validator.support import ASSIGNMENT, SETTINGS, checked, claim, make_producer, make_validator
from ...workers import ALICE, GROUPS, RUN, VALIDATOR, produced, signed

pytestmark = pytest.mark.usefixtures("one_thread")
VERSION = ASSIGNMENT.policy_version


@pytest.fixture(scope="module")
def worker(tiny_folder: Path) -> Producer:
    return make_producer(tiny_folder, SETTINGS)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def honest(worker: Producer) -> bytes:
    return worker.submission(ASSIGNMENT)


@pytest.fixture
def run(tiny_folder: Path, tmp_path: Path) -> Any:
    """A run whose folder still has the weights of the version."""
    versions = tmp_path / "learner" / "versions"
    versions.mkdir(parents=True)
    (versions / version_name(VERSION)).symlink_to(tiny_folder)
    store = Folder(tmp_path / "store")
    return SimpleNamespace(
        folder=tmp_path, coordinator=tmp_path, config=SETTINGS, run=RUN, store=store, connection=None
    )


def slashed(run: Any, data: bytes, reason: str = "proof") -> AuditState:
    """Return the audit's state after one hard rejection of this file, with the learner's records."""
    weights = blake3((run.folder / "learner" / "versions" / version_name(VERSION) / "model.safetensors").read_bytes())
    state = AuditState(SETTINGS)
    computed = SimpleNamespace(dtype="float32")
    digests = ["00" * 32] * VERSION + [weights.hexdigest()]
    state.records = [SimpleNamespace(before=digests[0], after=after, computed=computed) for after in digests[1:]]  # type: ignore[misc]
    body = {"worker": ALICE.public, "reason": reason, "version": VERSION, "file": run.store.put("submissions", data)}
    state.rejected[ASSIGNMENT.id] = Rejected(body, SETTINGS, confirmed=True)
    return state


def test_a_slash_for_an_honest_file_is_a_broken_link(run: Any, honest: bytes) -> None:
    with pytest.raises(BrokenError, match="was rejected as proof, but a validator would accept") as broken:
        judge_rejections(run, slashed(run, honest), limit=4)
    assert broken.value.link == f"rejection of {ASSIGNMENT.id}"


def test_a_slash_for_a_soft_fault_is_a_broken_link(run: Any, worker: Producer) -> None:
    rows = produced(worker, ASSIGNMENT)
    rows[0] = replace(rows[0], logprobs=[7.0] * len(rows[0].logprobs))
    with pytest.raises(BrokenError, match=r"a validator would reject the file softly \(bounds\)"):
        judge_rejections(run, slashed(run, signed(worker, ASSIGNMENT, rows)), limit=4)


def test_a_slash_for_a_lie_holds(run: Any, worker: Producer) -> None:
    rows = produced(worker, ASSIGNMENT)
    rows[0] = replace(rows[0], proofs=rows[1].proofs)
    state = slashed(run, signed(worker, ASSIGNMENT, rows), "sampling")  # this machine would give another hard reason
    assert judge_rejections(run, state, limit=4) == "hard rejections: 1 of 1 judged again"
    assert not state.checks.unproven


@pytest.mark.parametrize("missing", ["weights", "other weights", "request"])
def test_a_rejection_that_cannot_be_judged_again_is_counted(
    run: Any, honest: bytes, tiny_folders: tuple[Path, Path], missing: str
) -> None:
    state, folder = slashed(run, honest), run.folder / "learner" / "versions" / version_name(VERSION)
    if missing in ("weights", "other weights"):
        folder.unlink()
    if missing == "other weights":
        folder.symlink_to(tiny_folders[1])
    line = judge_rejections(run, state, limit=0 if missing == "request" else 4)
    assert line == "hard rejections: 0 of 1 judged again"
    assert sum(state.checks.unproven.values()) == 1


# --- accepted files --------------------------------------------------------------------------------------------------

Edit = Callable[[Header, list[AcceptedRollout]], tuple[Header, list[AcceptedRollout]]]


@pytest.fixture(scope="module")
def accepted(tiny_folder: Path, honest: bytes, one_thread: None) -> bytes:
    """The file of an honest validator."""
    validator = make_validator(tiny_folder, SETTINGS)
    with validator.judge:
        verdict, file = checked(validator, claim(), honest)
    assert verdict.reason is None and file is not None
    return file


def judge(run: Any, submission: bytes, accepted: bytes, edit: Edit) -> AuditState:
    """Let a validator sign an edited accepted file, whose groups are all in a batch. Judge it again. Return the state."""
    file = read_accepted(accepted, max_rows=64, max_tokens=1000)
    header, rows = edit(file.header, list(file.rows))
    state = AuditState(SETTINGS)
    state.names[VALIDATOR.public] = "vera"
    state.batched = {(ASSIGNMENT.id, group) for group in range(GROUPS)}
    facts: dict[str, Any] = {"worker": ALICE.public, "validator": VALIDATOR.public, "full": True, "nonce": header.nonce}
    facts |= {"step": 3, "version": VERSION, "tokens": 0, "useful": [], "group_tokens": []}
    facts |= {"file": run.store.put("submissions", submission), "config": SETTINGS}
    stored = run.store.put("accepted", write_accepted(header, rows, VALIDATOR))
    weights = run.folder / "learner" / "versions" / version_name(VERSION)
    judge_again(run, state, [Accepted(id=ASSIGNMENT.id, number=0, accepted=stored, **facts)], weights, "float32")
    return state


def unchanged(header: Header, rows: list[AcceptedRollout]) -> tuple[Header, list[AcceptedRollout]]:
    return header, rows


def with_first(**changed: Callable[[AcceptedRollout], Any]) -> Edit:
    """Return an edit that changes fields of the first rollout."""

    def edit(header: Header, rows: list[AcceptedRollout]) -> tuple[Header, list[AcceptedRollout]]:
        first = replace(rows[0], **{name: value(rows[0]) for name, value in changed.items()})
        return header, [first, *rows[1:]]

    return edit


def as_partly_prefilled(edit: Edit) -> Edit:
    return lambda header, rows: edit(header.model_copy(update={"prefilled": False}), rows)


def test_the_file_of_an_honest_validator_passes(run: Any, honest: bytes, accepted: bytes) -> None:
    assert not judge(run, honest, accepted, unchanged).checks.unproven


def test_a_later_config_with_other_limits_does_not_judge_earlier_work(run: Any, honest: bytes, accepted: bytes) -> None:
    stricter = SETTINGS.validator.model_copy(update={"proof_exponent_mean": -1.0})
    run.config = SETTINGS.model_copy(update={"validator": stricter})
    judge(run, honest, accepted, unchanged)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (with_first(reward=lambda row: row.reward + 1e-5), "a reward of .* in group 0"),
        (with_first(reward=lambda row: float("nan")), "a reward of nan in group 0"),
        (with_first(prompt=lambda row: [*row.prompt[:-1], row.prompt[-1] + 1]), "prompts that are not those"),
        (with_first(task=lambda row: f"{row.task}0"), ".*, or other tasks"),
        (with_first(logprobs=lambda row: [-9.0] * len(row.logprobs)), "false logprobs: .* off by"),
        (with_first(logprobs=lambda row: row.logprobs[:-1]), "a wrong number of logprobs"),
        (
            as_partly_prefilled(with_first(logprobs=lambda row: [row.logprobs[0] - 1e-3, *row.logprobs[1:]])),
            "logprobs that are not the worker's",
        ),
    ],
)
def test_a_lie_of_a_validator_about_what_the_learner_reads_is_a_broken_link(
    run: Any, honest: bytes, accepted: bytes, edit: Edit, named: str
) -> None:
    with pytest.raises(BrokenError, match=f"the validator vera signed {named}") as broken:
        judge(run, honest, accepted, edit)
    assert broken.value.link == f"accepted file of {ASSIGNMENT.id}"


def test_a_partly_prefilled_file_holds_the_workers_logprobs(run: Any, honest: bytes, accepted: bytes) -> None:
    theirs = [row.logprobs for row in read_submission(honest, max_rows=64, max_tokens=1000).rows]

    def copied(header: Header, rows: list[AcceptedRollout]) -> tuple[Header, list[AcceptedRollout]]:
        return header, [replace(row, logprobs=logprobs) for row, logprobs in zip(rows, theirs, strict=True)]

    judge(run, honest, accepted, as_partly_prefilled(copied))


def test_rewards_that_another_machine_may_not_give_are_counted(
    run: Any, honest: bytes, accepted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = with_first(reward=lambda row: row.reward + 1)
    with monkeypatch.context() as patch:
        patch.setattr(graders, "_installed", lambda: "CPython 3.99.0 x86_64")
        counted = judge(run, honest, accepted, other).checks.unproven
    assert [what.partition(":")[2] for what in counted] == [
        " the validator's graders have other versions than those here"
    ]
    ran = Grade(0.0, tier="bubblewrap")
    monkeypatch.setattr(graders.Graders, "grade", lambda self, tasks, texts: [ran] * len(tasks))
    [(what, count)] = judge(run, honest, accepted, other).checks.unproven.items()
    assert (what, count) == ("rewards: another machine may give others", GROUPS * SETTINGS.sampling.group_size)
