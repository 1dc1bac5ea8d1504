"""The audit judges hard rejections again if the weights still exist; a slash for an honest file is a broken link."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from shoal.cli.audit.pay import AuditState, Rejected
from shoal.cli.audit.recompute import judge_rejections
from shoal.cli.audit.run import BrokenError
from shoal.shardcast.manifest import version_name
from shoal.store.folder import Folder
from shoal.worker.produce import Producer

from ...validator.support import ASSIGNMENT, SETTINGS, make_producer
from ...workers import ALICE, RUN, produced, signed

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
    state.rejected[ASSIGNMENT.id] = Rejected(body, SETTINGS)
    return state


def test_a_slash_for_an_honest_file_is_a_broken_link(run: Any, honest: bytes) -> None:
    with pytest.raises(BrokenError, match="was slashed for proof, but a validator would accept") as broken:
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
    assert not state.unproven


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
    assert sum(state.unproven.values()) == 1
