"""An attacker uploads an honest worker's rollouts as her own, before the worker does. Only the attacker is slashed."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from blake3 import blake3

from shoal.protocol.messages import Assignment, Reason
from shoal.store.rollouts import read_submission
from shoal.validator.service import Validator
from shoal.worker.produce import Producer

from ..coordinator.support import SIGNERS, Harness, open_pool
from ..validator.support import SETTINGS, ValidatorsNode, make_producer
from ..workers import ALICE, BOB, RUN, produced, signed

pytestmark = pytest.mark.usefixtures("one_thread")
MALLORY = BOB


@dataclass
class Site:
    harness: Harness
    validator: Validator
    alice: Producer
    mallory: Producer

    def upload(self, worker: Producer, assignment: Assignment, data: bytes) -> None:
        self.validator.node.files[assignment.id] = data  # type: ignore[attr-defined]
        file_hash = blake3(data).hexdigest()
        self.harness.pool.assignments.uploaded(worker.identity.public, assignment.id, file_hash)

    def judge(self) -> Reason | None:
        """Let two validators judge the oldest upload. Return the reason for rejecting it, or None if it is accepted."""
        judgement, reason = self.harness.pool.judgement, None
        for key, signer in SIGNERS.items():
            for claim in self.harness.claims(key, 1):
                [result] = self.validator.check([claim])
                if result.accepted is not None:
                    judgement.accepted_stored(key, claim.assignment.id, "8" * 64)
                judgement.judge(key, result.verdict(signer, "8" * 64 if result.accepted else ""))
                reason = result.reason
            if reason is None:
                break
        return reason


@pytest.fixture
def site(tiny_folder: Path) -> Site:
    harness = open_pool()
    harness.pool.judgement.run = RUN
    harness.join(ALICE.public)
    harness.join(MALLORY.public, name="mallory")
    for key in SIGNERS:
        harness.join(key, "validator")
    harness.publish(0)
    node = ValidatorsNode(policy_version=0)
    validator = Validator(node, SETTINGS, tiny_folder, "", "float32")  # type: ignore[arg-type]
    validator.judge.load(tiny_folder)
    alice, mallory = (make_producer(tiny_folder, SETTINGS, identity=identity) for identity in (ALICE, MALLORY))
    return Site(harness, validator, alice, mallory)


def test_whoever_uploads_a_workers_rollouts_first_is_slashed_and_the_worker_is_accepted(site: Site) -> None:
    """In this test Mallory even has the nonce, which she could not really know before Alice does."""
    alices, mallorys = site.harness.task(ALICE.public), site.harness.task(MALLORY.public)
    site.upload(site.mallory, mallorys, signed(site.mallory, mallorys, produced(site.alice, alices)))
    assert site.judge() is Reason.TASKS
    site.upload(site.alice, alices, site.alice.submission(alices))
    assert site.judge() is None
    assert site.harness.status().slashed == ["mallory"]
    assert site.harness.status().reject_reasons == {"tasks": 1}


def test_a_copy_without_a_verdict_does_not_own_its_content(site: Site) -> None:
    alices, mallorys = site.harness.task(ALICE.public), site.harness.task(MALLORY.public)
    site.upload(site.mallory, mallorys, signed(site.mallory, mallorys, produced(site.alice, alices)))
    site.harness.claims(list(SIGNERS)[-1], 1)  # another validator claims the copy and never judges it
    site.upload(site.alice, alices, site.alice.submission(alices))
    assert site.judge() is None
    assert site.harness.status().slashed == []


def test_a_workers_next_rollouts_cannot_be_computed_before_its_assignment(site: Site) -> None:
    """The nonce is the only part of an assignment that is secret beforehand. Without it, the seeds are different."""
    first = site.harness.task(ALICE.public)
    site.upload(site.alice, first, site.alice.submission(first))
    assert site.judge() is None
    public = first.model_copy(update={"number": 1, "id": f"{ALICE.public[:16]}-000001"})
    alices = site.harness.task(ALICE.public)
    known = {"nonce": alices.nonce, "upload_path": alices.upload_path}
    assert public.model_copy(update=known) == alices, "everything but the nonce must be known beforehand"
    seeds = [{seed for plan in site.alice.plan(assignment) for seed in plan.seeds} for assignment in (public, alices)]
    assert not seeds[0] & seeds[1]


def test_a_file_for_another_nonce_does_not_slash_its_worker(site: Site) -> None:
    """A coordinator restored from older state may assign a number again, for another version and with another nonce."""
    before = site.harness.task(ALICE.public)
    data = site.alice.submission(before.model_copy(update={"nonce": "f" * 32}))
    site.upload(site.alice, before, data)
    assert site.judge() is Reason.CONTEXT
    assert site.harness.beat(ALICE.public).state == "running" and site.harness.status().slashed == []
    assert read_submission(data, max_rows=8, max_tokens=40).header.nonce == "f" * 32
