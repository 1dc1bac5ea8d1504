"""An attacker uploads an honest worker's rollouts first, as her own, through pool and judge: she alone is slashed."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shoal.protocol.messages import Assignment, ContentOwner, Reason
from shoal.store.rollouts import read_submission
from shoal.validator.service import Validator
from shoal.worker.produce import Producer

from ..coordinator.support import VALIDATOR, Harness, open_pool
from ..validator.support import SETTINGS, ValidatorsNode, make_producer
from ..workers import ALICE, BOB, produced, signed

pytestmark = pytest.mark.usefixtures("one_thread")
MALLORY = BOB


@dataclass
class PoolsNode(ValidatorsNode):
    """A validator's node that asks a real pool who owns content."""

    harness: Any = None
    asked: list[str] = field(default_factory=list)

    def get(self, path: str, answer: type[ContentOwner]) -> ContentOwner:
        self.asked.append(path)
        return self.harness.pool.judgement.content_owner(path.rpartition("/")[2])  # type: ignore[no-any-return]


@dataclass
class Site:
    harness: Harness
    validator: Validator
    alice: Producer
    mallory: Producer

    def upload(self, worker: Producer, asked: Assignment, data: bytes) -> None:
        self.validator.node.files[asked.id] = data  # type: ignore[attr-defined]
        self.harness.pool.assignments.uploaded(worker.identity.public, asked.id, "9" * 64)

    def judge(self) -> Reason | None:
        """The pool's reason for the oldest upload, as its validator sees it."""
        [claim] = self.harness.claims(VALIDATOR, 1)
        [(verdict, accepted)] = self.validator.check([claim])
        submissions = self.harness.pool.judgement
        if accepted is not None:
            submissions.accepted_stored(VALIDATOR, claim.assignment.id, "8" * 64)
            verdict = verdict.model_copy(update={"accepted_hash": "8" * 64})
        submissions.judge(VALIDATOR, verdict)
        return verdict.reason


@pytest.fixture
def site(tiny_folder: Path) -> Site:
    harness = open_pool()
    harness.join(ALICE.public)
    harness.join(MALLORY.public, name="mallory")
    harness.join(VALIDATOR, "validator")
    harness.publish(0)
    node = PoolsNode(policy_version=0, harness=harness)
    validator = Validator(node, SETTINGS, tiny_folder, "", "float32")  # type: ignore[arg-type]
    validator.judge.load(tiny_folder)
    alice, mallory = (make_producer(tiny_folder, SETTINGS, identity=one) for one in (ALICE, MALLORY))
    return Site(harness, validator, alice, mallory)


def test_who_uploads_a_workers_rollouts_first_loses_and_the_worker_is_paid(site: Site) -> None:
    """Even with the nonce, which she cannot know before Alice does."""
    hers, mine = site.harness.task(ALICE.public), site.harness.task(MALLORY.public)
    stolen = produced(site.alice, hers)
    site.upload(site.mallory, mine, signed(site.mallory, mine, stolen))
    assert site.judge() is Reason.TASKS
    site.upload(site.alice, hers, site.alice.submission(hers))
    assert site.judge() is None
    assert site.harness.status().slashed == ["mallory"]
    assert site.harness.status().reject_reasons == {"tasks": 1}


def test_a_copy_that_waits_for_its_verdict_owns_nothing(site: Site) -> None:
    hers, mine = site.harness.task(ALICE.public), site.harness.task(MALLORY.public)
    site.upload(site.mallory, mine, signed(site.mallory, mine, produced(site.alice, hers)))
    site.harness.claims("f" * 64, 1)  # another validator holds the copy
    site.upload(site.alice, hers, site.alice.submission(hers))
    assert site.judge() is None
    assert site.harness.status().slashed == []


def test_the_next_rollouts_of_a_worker_cannot_be_computed_before_its_task_is_given_out(site: Site) -> None:
    """All that is public before: run, step, version, digest, key, number. What she guesses is another task."""
    first = site.harness.accepted(ALICE.public, useful=(False, False))
    public = first.model_copy(update={"number": 1, "id": f"{ALICE.public[:16]}-000001"})
    hers = site.harness.task(ALICE.public)
    assert public.model_copy(update={"nonce": hers.nonce, "upload_path": hers.upload_path, "deadline_s": 0.0}) == (
        hers.model_copy(update={"deadline_s": 0.0})
    ), "only the nonce is missing"
    seeds = [{seed for plan in site.alice.plan(asked) for seed in plan.seeds} for asked in (public, hers)]
    assert not seeds[0] & seeds[1]


def test_a_file_for_another_assignment_is_not_held_against_its_worker(site: Site) -> None:
    """A coordinator that came back to older state gives a number again, with another nonce."""
    before = site.harness.task(ALICE.public)
    data = site.alice.submission(before.model_copy(update={"nonce": "f" * 32}))
    site.upload(site.alice, before, data)
    assert site.judge() is Reason.CONTEXT
    assert site.harness.beat(ALICE.public).state == "running" and site.harness.status().slashed == []
    assert read_submission(data, max_rows=8, max_tokens=40).header.nonce == "f" * 32
