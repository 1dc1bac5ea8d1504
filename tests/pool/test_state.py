import json
import multiprocessing
import os
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.config import Config, parse
from shoal.messages import (
    HARD,
    Assignment,
    Evaluation,
    GroupResult,
    Heartbeat,
    HeartbeatAnswer,
    InvitePayload,
    Policy,
    Reason,
    StepReport,
    Verdict,
)
from shoal.pool.identity import Identity
from shoal.pool.ledger import Ledger, verify_chain
from shoal.pool.state import Pool, PoolError

COORDINATOR = Identity(Ed25519PrivateKey.from_private_bytes(bytes(32)))
VALIDATOR, OTHER_VALIDATOR, LEARNER = "e" * 64, "f" * 64, "1" * 64
ALICE, BOB, CAROL = "a" * 64, "b" * 64, "c" * 64


@dataclass
class Clock:
    now_s: float = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Desk:
    """A pool and what the other processes would say to it."""

    pool: Pool
    clock: Clock
    contents: int = field(default=0)

    def join(self, key: str, role: Any = "worker", name: str = "") -> None:
        self.pool.register(key, payload(name or f"{role}-{key[0]}", role=role, nonce=key[:32]), None)

    def publish(self, *versions: int) -> None:
        for version in versions:
            self.pool.publish(Policy(version=version, digest=f"{version:064x}", size_bytes=1))

    def beat(self, key: str = ALICE, version: int | None = 0, *, wants: bool = True) -> HeartbeatAnswer:
        return self.pool.heartbeat(key, Heartbeat(policy_version=version, wants_task=wants))

    def task(self, key: str = ALICE, version: int | None = 0) -> Assignment:
        answer = self.beat(key, version)
        assert answer.assignment is not None, answer.waiting_for
        return answer.assignment

    def upload(self, key: str = ALICE, version: int = 0) -> Assignment:
        task = self.task(key, version)
        self.pool.uploaded(key, task.id, "9" * 64)
        return task

    def judge(
        self,
        id: str,
        reason: Reason | None = None,
        useful: tuple[bool, ...] = (True, True),
        validator: str = VALIDATOR,
        content: str | None = None,
    ) -> None:
        self.contents += 1
        if reason is None:
            self.pool.accepted_stored(validator, id, "8" * 64)
        self.pool.judge(validator, verdict(id, reason, useful, content or f"{self.contents:064x}"))

    def accepted(self, key: str = ALICE, version: int = 0, useful: tuple[bool, ...] = (True, True)) -> Assignment:
        """One submission all the way."""
        task = self.upload(key, version)
        claim = self.pool.claim(VALIDATOR)
        assert claim is not None and claim.assignment.id == task.id
        self.judge(task.id, None, useful)
        return task

    def kinds(self) -> list[str]:
        return [entry.kind for entry in self.pool.ledger.entries()]


def payload(name: str, *, role: Any = "worker", nonce: str = "0" * 32, expires_s: int = 2_000) -> InvitePayload:
    return InvitePayload(run="r", role=role, name=name, nonce=nonce, expires_s=expires_s)


def verdict(id: str, reason: Reason | None, useful: tuple[bool, ...], content: str | None) -> Verdict:
    groups = [GroupResult(reward_mean=0.5, useful=u, tokens=10) for u in useful] if reason is None else []
    accepted_hash = None if reason else "8" * 64
    return Verdict(
        submission=id,
        reason=reason,
        detail="",
        evidence={},
        content=content,
        accepted_hash=accepted_hash,
        groups=groups,
    )


def config(**coordinator: Any) -> Config:
    """Batches of 4 groups, submissions of 2, tasks for 100 s, leases for 50 s, async level 2, 6 steps."""
    settings = {"prompts_per_step": 4, "task_deadline_s": 100, "claim_lease_s": 50, "node_timeout_s": 30}
    return parse(
        {
            "run": {"steps": 6},
            "coordinator": settings | coordinator,
            "workers": {"groups_per_submission": 2},
            "learner": {"optimizer_steps_per_step": 1},
        }
    )


def open_pool(path: Path | str = ":memory:", clock: Clock | None = None, **coordinator: Any) -> Desk:
    connection = sqlite3.connect(path, isolation_level=None)
    clock = clock or Clock()
    ledger = Ledger(connection, COORDINATOR, clock=clock)
    return Desk(Pool(connection, ledger, config(**coordinator), "r", clock), clock)


@pytest.fixture
def desk() -> Desk:
    """Two workers, two validators, version 0."""
    found = open_pool()
    for key in (ALICE, BOB):
        found.join(key)
    for key in (VALIDATOR, OTHER_VALIDATOR):
        found.join(key, "validator")
    found.publish(0)
    return found


# --- members ---------------------------------------------------------------------------------------------------------


def test_an_invite_makes_a_member_of_its_role_and_name() -> None:
    desk = open_pool()
    answer = desk.pool.register(ALICE, payload("alice"), None)
    assert (answer.name, answer.role, desk.pool.role(ALICE)) == ("alice", "worker", "worker")
    assert desk.kinds() == ["registered"]


def test_the_same_key_may_come_again_with_a_new_address_even_after_expiry() -> None:
    desk = open_pool()
    invite = payload("relay", role="relay")
    desk.pool.register(ALICE, invite, "http://a:1")
    desk.clock.now_s = 9_999
    desk.pool.register(ALICE, invite, "http://a:2")
    assert desk.beat(ALICE, wants=False).relays == ["http://a:2"]
    assert desk.kinds() == ["registered"], "a restart is not registered twice"


def test_an_invite_is_spent_by_the_first_key() -> None:
    desk = open_pool()
    desk.pool.register(ALICE, payload("alice"), None)
    with pytest.raises(PoolError, match="used by another key") as caught:
        desk.pool.register(BOB, payload("alice"), None)
    assert caught.value.status == 403
    assert desk.pool.role(BOB) is None


def test_a_name_is_taken_whatever_the_invite() -> None:
    desk = open_pool()
    desk.pool.register(ALICE, payload("alice"), None)
    with pytest.raises(PoolError, match="another key"):
        desk.pool.register(BOB, payload("alice", nonce="1" * 32), None)


def test_one_key_has_one_role() -> None:
    desk = open_pool()
    desk.pool.register(ALICE, payload("alice"), None)
    with pytest.raises(PoolError, match="already registered as alice"):
        desk.pool.register(ALICE, payload("boss", role="learner", nonce="1" * 32), None)
    assert desk.pool.role(ALICE) == "worker"


def test_an_expired_invite_is_refused() -> None:
    desk = open_pool()
    desk.clock.now_s = 2_000.5
    with pytest.raises(PoolError, match="expired"):
        desk.pool.register(ALICE, payload("alice"), None)


def test_the_descriptor_names_keys_of_every_role_but_workers(desk: Desk) -> None:
    assert desk.pool.keys() == {"validator": [VALIDATOR, OTHER_VALIDATOR]}


# --- handing out -----------------------------------------------------------------------------------------------------


def test_a_worker_that_asks_gets_a_task_of_its_version(desk: Desk) -> None:
    task = desk.task()
    assert (task.number, task.step, task.policy_version, task.groups) == (0, 0, 0, 2)
    assert task.id == f"{ALICE[:16]}-000000" and task.policy_digest == f"{0:064x}"
    assert task.deadline_s == desk.clock.now_s + 100


def test_only_workers_that_want_one_get_a_task(desk: Desk) -> None:
    assert desk.beat(wants=False).assignment is None
    assert desk.beat(VALIDATOR, 0).assignment is None


@pytest.mark.parametrize(
    "loaded, reason", [(None, "this worker to load version 0"), (1, "which this worker says it has, to be published")]
)
def test_a_worker_without_a_published_version_waits(desk: Desk, loaded: int | None, reason: str) -> None:
    answer = desk.beat(ALICE, loaded)
    assert answer.assignment is None and reason in answer.waiting_for


def test_nobody_works_before_the_first_version() -> None:
    desk = open_pool()
    desk.join(ALICE)
    assert desk.beat(ALICE, None).waiting_for == "the learner to publish version 0"


def advance(desk: Desk, steps: int, version: int = 0) -> None:
    """Fill the batches of `steps` steps with rollouts of one version."""
    for _ in range(steps):
        desk.accepted(version=version)
        desk.accepted(version=version)


def test_rollouts_run_ahead_of_the_learner_by_the_async_level_and_no_further(desk: Desk) -> None:
    advance(desk, 2)
    assert desk.task(version=0).step == 2, "step 2 may train on version 0"
    desk.pool.uploaded(ALICE, desk.task(version=0).id, "9" * 64)
    desk.pool.claim(VALIDATOR)
    desk.judge(f"{ALICE[:16]}-000004")
    desk.accepted(version=0)
    assert desk.beat(version=0).waiting_for == "the learner to publish version 1"


def test_a_worker_with_too_old_weights_is_told_to_load_newer_ones(desk: Desk) -> None:
    advance(desk, 3)
    desk.publish(1, 2)
    assert desk.beat(version=0).waiting_for == "this worker to load version 2"
    assert desk.task(version=1).policy_version == 1, "an older version within the level is fine"


def test_an_async_level_of_zero_takes_only_the_version_of_the_step() -> None:
    desk = open_pool(async_level=0)
    desk.join(ALICE)
    desk.join(VALIDATOR, "validator")
    desk.publish(0)
    advance(desk, 1)
    assert "publish version 1" in desk.beat(version=0).waiting_for
    desk.publish(1)
    assert "load version 1" in desk.beat(version=0).waiting_for
    assert desk.task(version=1).step == 1


def test_a_restarted_worker_gets_the_same_task_with_the_same_deadline(desk: Desk) -> None:
    first = desk.task()
    desk.clock.now_s += 40
    assert desk.task() == first


def test_a_restarted_worker_gets_its_task_back_even_where_enough_is_under_way(desk: Desk) -> None:
    first, _ = desk.task(ALICE), desk.task(BOB)
    desk.join(CAROL)
    assert "catch up" in desk.beat(CAROL, 0).waiting_for
    assert desk.task(ALICE) == first


def test_a_newer_version_ends_the_open_task_and_gives_the_next_number(desk: Desk) -> None:
    first = desk.task()
    desk.publish(1)
    second = desk.task(version=1)
    assert (second.number, second.policy_version) == (1, 1)
    with pytest.raises(PoolError, match="expired, not open"):
        desk.pool.uploaded(ALICE, first.id, "9" * 64)


def test_a_worker_cannot_draw_other_tasks_by_going_back_to_an_older_version(desk: Desk) -> None:
    desk.publish(1)
    first = desk.task(version=1)
    assert desk.beat(version=0).waiting_for == "this worker to load version 1"
    assert desk.task(version=1) == first


def test_after_its_deadline_a_task_is_refused_and_another_is_given(desk: Desk) -> None:
    late = desk.task()
    desk.clock.now_s += 100.5
    with pytest.raises(PoolError, match="after its deadline") as caught:
        desk.pool.uploaded(ALICE, late.id, "9" * 64)
    assert caught.value.status == 409
    assert desk.task().number == 1
    with pytest.raises(PoolError, match="expired"):
        desk.pool.uploaded(ALICE, late.id, "9" * 64)


def test_a_task_can_be_uploaded_once_and_only_by_its_worker(desk: Desk) -> None:
    task = desk.task()
    with pytest.raises(PoolError, match="another worker") as caught:
        desk.pool.uploaded(BOB, task.id, "9" * 64)
    assert caught.value.status == 403
    desk.pool.uploaded(ALICE, task.id, "9" * 64)
    with pytest.raises(PoolError, match="uploaded, not open"):
        desk.pool.uploaded(ALICE, task.id, "7" * 64)
    assert desk.pool.hashes(task.id) == ("9" * 64, "")


def test_an_unknown_submission_is_not_found(desk: Desk) -> None:
    with pytest.raises(PoolError, match="no submission") as caught:
        desk.pool.may_upload(ALICE, "0" * 16 + "-000000")
    assert caught.value.status == 404


def test_a_file_of_a_version_no_batch_can_take_any_more_is_refused(desk: Desk) -> None:
    late = desk.task(BOB, 0)  # held back until its version is too old, when relays may no longer have it either
    for version in (0, 0, 0):
        desk.accepted(version=version)
        desk.clock.now_s += 31  # Bob is silent: his task is not counted on
        desk.accepted(version=version)
    assert desk.pool.status().step == 3
    with pytest.raises(PoolError, match="version 0, older than 1") as caught:
        desk.pool.uploaded(BOB, late.id, "9" * 64)
    assert caught.value.status == 409


# --- back-pressure ---------------------------------------------------------------------------------------------------


def test_no_more_is_handed_out_than_the_next_batch_needs(desk: Desk) -> None:
    desk.join(CAROL)
    desk.task(ALICE)
    desk.task(BOB)
    assert desk.beat(CAROL, 0).waiting_for == "the validators and the learner to catch up"


def test_what_is_uploaded_or_claimed_counts_as_under_way(desk: Desk) -> None:
    desk.upload(ALICE)
    desk.upload(BOB)
    assert "catch up" in desk.beat(ALICE, 0).waiting_for
    desk.pool.claim(VALIDATOR)
    assert "catch up" in desk.beat(ALICE, 0).waiting_for


def test_where_few_groups_are_useful_more_is_handed_out(desk: Desk) -> None:
    desk.join(CAROL)
    desk.accepted(useful=(True, False))  # share 0.5, one waiting: 3 more needed, which is 3 submissions
    for key in (ALICE, BOB, CAROL):
        desk.task(key)
    desk.join("d" * 64)
    assert "catch up" in desk.beat("d" * 64, 0).waiting_for


def test_a_rejected_submission_is_no_longer_under_way(desk: Desk) -> None:
    desk.upload(ALICE)
    desk.upload(BOB)
    claim = desk.pool.claim(VALIDATOR)
    assert claim is not None
    desk.judge(claim.assignment.id, Reason.UNREADABLE)
    assert desk.task(ALICE).number == 1


def test_a_silent_workers_task_is_not_waited_for(desk: Desk) -> None:
    desk.join(CAROL)
    silent = desk.task(ALICE)
    desk.task(BOB)
    desk.clock.now_s += 31
    desk.beat(BOB, 0, wants=False)
    assert desk.task(CAROL).number == 0
    desk.pool.uploaded(ALICE, silent.id, "9" * 64)  # it only was slow: its grant is still good


# --- checking --------------------------------------------------------------------------------------------------------


def test_claims_come_oldest_first_and_one_validator_holds_each(desk: Desk) -> None:
    first, second = desk.upload(ALICE), desk.upload(BOB)
    one, two = desk.pool.claim(VALIDATOR), desk.pool.claim(OTHER_VALIDATOR)
    assert one is not None and two is not None
    assert (one.assignment.id, one.worker) == (first.id, ALICE)
    assert two.assignment.id == second.id
    assert desk.pool.claim("d" * 64) is None


def test_a_restarted_validator_gets_its_claim_again(desk: Desk) -> None:
    desk.upload()
    one, again = desk.pool.claim(VALIDATOR), desk.pool.claim(VALIDATOR)
    assert one is not None and again is not None and again.assignment == one.assignment


def test_a_claim_that_ran_out_goes_to_another_validator_whose_verdict_alone_counts(desk: Desk) -> None:
    task = desk.upload()
    desk.pool.claim(VALIDATOR)
    assert desk.pool.claim(OTHER_VALIDATOR) is None
    desk.clock.now_s += 50.5
    again = desk.pool.claim(OTHER_VALIDATOR)
    assert again is not None and again.assignment.id == task.id
    with pytest.raises(PoolError, match="not claimed by this validator") as caught:
        desk.judge(task.id)
    assert caught.value.status == 409
    desk.judge(task.id, validator=OTHER_VALIDATOR)
    with pytest.raises(PoolError, match="accepted and not claimed"):
        desk.judge(task.id)


def test_a_verdict_may_come_twice_and_counts_once(desk: Desk) -> None:
    task = desk.upload()
    desk.pool.claim(VALIDATOR)
    desk.pool.accepted_stored(VALIDATOR, task.id, "8" * 64)
    for _ in range(2):
        desk.pool.judge(VALIDATOR, verdict(task.id, None, (True, True), "5" * 64))
    assert desk.kinds().count("accepted") == 1
    assert desk.pool.status().have == 2


def test_accepting_needs_the_accepted_file_that_was_stored(desk: Desk) -> None:
    task = desk.upload()
    desk.pool.claim(VALIDATOR)
    with pytest.raises(PoolError, match="store the accepted file"):
        desk.pool.judge(VALIDATOR, verdict(task.id, None, (True, True), "5" * 64))
    desk.pool.accepted_stored(VALIDATOR, task.id, "7" * 64)
    with pytest.raises(PoolError, match="store the accepted file"):
        desk.pool.judge(VALIDATOR, verdict(task.id, None, (True, True), "5" * 64))
    assert desk.pool.status().have == 0 and "accepted" not in desk.kinds()


def test_only_who_holds_the_claim_stores_the_accepted_file(desk: Desk) -> None:
    task = desk.upload()
    desk.pool.claim(VALIDATOR)
    with pytest.raises(PoolError, match="not claimed"):
        desk.pool.accepted_stored(OTHER_VALIDATOR, task.id, "8" * 64)


def test_rollouts_accepted_before_are_rejected_as_replayed_though_the_validator_did_not_know(desk: Desk) -> None:
    first, second = desk.upload(ALICE), desk.upload(BOB)
    desk.pool.claim(VALIDATOR)
    desk.pool.claim(OTHER_VALIDATOR)
    desk.judge(first.id, content="5" * 64)
    desk.judge(second.id, content="5" * 64, validator=OTHER_VALIDATOR)
    assert desk.pool.content_owner("5" * 64).submission == first.id
    assert desk.pool.status().reject_reasons == {"replayed": 1}
    assert desk.pool.status().have == 2, "the copy's groups are not credited"
    assert desk.beat(BOB, 0).state == "evicted"


def test_nobody_owns_rollouts_that_were_not_judged(desk: Desk) -> None:
    assert desk.pool.content_owner("5" * 64).submission is None


@pytest.mark.parametrize("reason", sorted(HARD))
def test_a_hard_rejection_evicts_and_slashes(desk: Desk, reason: Reason) -> None:
    task = desk.upload()
    desk.pool.claim(VALIDATOR)
    desk.judge(task.id, reason)
    assert desk.beat().state == "evicted"
    assert desk.kinds()[-2:] == ["rejected", "slashed"]
    body = json.loads(next(desk.pool.ledger.entries(kind="slashed")).body)
    assert body == {"submission": task.id, "worker": ALICE, "step": 0, "file": "9" * 64, "reason": reason}
    assert desk.pool.status().slashed == ["worker-a"]


@pytest.mark.parametrize("reason", sorted(frozenset(Reason) - HARD))
def test_a_soft_rejection_costs_the_submission_only(desk: Desk, reason: Reason) -> None:
    task = desk.upload()
    desk.pool.claim(VALIDATOR)
    desk.judge(task.id, reason)
    assert desk.kinds()[-1] == "rejected" and "slashed" not in desk.kinds()
    assert desk.task().number == 1


def test_one_is_slashed_once_and_loses_its_open_task(desk: Desk) -> None:
    desk.upload()
    second = desk.upload()
    desk.pool.claim(VALIDATOR)
    desk.judge(f"{ALICE[:16]}-000000", Reason.PROOF)
    desk.pool.claim(VALIDATOR)
    desk.judge(second.id, Reason.PROOF)
    assert desk.kinds().count("slashed") == 1 and desk.kinds().count("rejected") == 2


def test_an_evicted_worker_cannot_hand_in_the_task_it_still_held(desk: Desk) -> None:
    lied = desk.upload()
    held = desk.task()
    desk.pool.claim(VALIDATOR)
    desk.judge(lied.id, Reason.PROOF)
    with pytest.raises(PoolError, match="expired"):
        desk.pool.uploaded(ALICE, held.id, "9" * 64)


# --- batches ---------------------------------------------------------------------------------------------------------


def groups(desk: Desk, step: int) -> list[tuple[str, int]]:
    batch = desk.pool.batch(step)
    assert batch.ready
    return [(group.submission, group.group) for group in batch.groups]


def test_a_batch_is_ready_when_it_is_full_of_useful_groups_oldest_first(desk: Desk) -> None:
    first = desk.accepted(useful=(False, True))
    second = desk.accepted(BOB)
    assert (desk.pool.batch(0).ready, desk.pool.batch(0).have, desk.pool.batch(0).need) == (False, 3, 4)
    third = desk.accepted()
    assert groups(desk, 0) == [(first.id, 1), (second.id, 0), (second.id, 1), (third.id, 0)]
    assert desk.pool.batch(1).have == 1, "what is left over waits for the next step"


def test_a_full_batch_never_changes(desk: Desk) -> None:
    desk.accepted()
    desk.accepted()
    before = desk.pool.batch(0)
    desk.accepted()
    desk.accepted()
    assert desk.pool.batch(0) == before
    assert desk.pool.batch(1).ready and not desk.pool.batch(2).ready


def test_leftovers_that_fill_further_batches_close_them_at_once(desk: Desk) -> None:
    desk.accepted(useful=(True,) * 11)
    assert [desk.pool.batch(step).ready for step in range(3)] == [True, True, False]
    assert desk.pool.batch(2).have == 3


def test_groups_are_taken_until_exactly_the_async_level(desk: Desk) -> None:
    desk.accepted(useful=(True,) * 3)  # version 0
    desk.publish(1, 2, 3)
    for version in (1, 2):
        desk.accepted(version=version, useful=(True,) * 4)
    assert desk.pool.status().step == 2, "three groups are left over"
    desk.accepted(version=2, useful=(True,))
    assert groups(desk, 2)[-1][0] == f"{ALICE[:16]}-000003"
    assert desk.pool.status().stale_groups == 0


def test_a_group_one_version_too_old_is_counted_stale_and_never_trained_on() -> None:
    desk = open_pool(async_level=1)
    desk.join(ALICE)
    desk.join(BOB)
    desk.join(VALIDATOR, "validator")
    desk.publish(0, 1, 2)
    old = desk.upload(BOB, 0)
    fresh = desk.upload(ALICE, 1)
    desk.pool.claim(VALIDATOR)  # Bob's: its verdict is late
    desk.clock.now_s += 51
    desk.pool.claim(OTHER_VALIDATOR)
    claim = desk.pool.claim(VALIDATOR)
    assert claim is not None and claim.assignment.id == fresh.id
    desk.judge(fresh.id, useful=(True,) * 8)
    assert desk.pool.status().step == 2, "steps 0 and 1 are full: version 0 is too old for step 2"
    desk.judge(old.id, validator=OTHER_VALIDATOR)
    assert desk.pool.status().stale_groups == 2 and desk.pool.status().have == 0
    desk.accepted(version=2, useful=(True,) * 4)
    assert old.id not in {submission for submission, _ in groups(desk, 2)}


def test_a_step_after_the_last_says_that_the_run_is_over(desk: Desk) -> None:
    assert desk.pool.batch(6).finished and not desk.pool.batch(5).finished


def test_nothing_is_handed_out_when_every_batch_is_full(desk: Desk) -> None:
    desk.accepted(useful=(True,) * 12)
    desk.publish(1, 2, 3)
    desk.accepted(version=3, useful=(True,) * 12)
    assert "every batch is full" in desk.beat(version=3).waiting_for


# --- the learner's and evaluator's notes -----------------------------------------------------------------------------


def test_a_version_is_published_once_with_one_digest(desk: Desk) -> None:
    desk.publish(0)
    with pytest.raises(PoolError, match="another digest"):
        desk.pool.publish(Policy(version=0, digest="7" * 64, size_bytes=1))
    assert desk.kinds().count("policy") == 1


def test_a_trained_step_is_noted_with_the_rewards_of_all_its_groups(desk: Desk) -> None:
    desk.accepted(useful=(True, False))
    for loss in (1.0, 2.0):  # a learner that was killed reports the step again
        desk.pool.trained(StepReport(step=0, metrics={"loss": loss}, trained=["b", "a", "a"]))
    (metrics,) = desk.pool.status().metrics
    assert metrics == {
        "step": 0.0,
        "time_s": 1_000.0,
        "loss": 2.0,
        "reward/mean": 0.5,
        "reward/zero_std_frac": 0.5,
    }
    (entry,) = desk.pool.ledger.entries(kind="trained")
    assert json.loads(entry.body) == {"step": 0, "submissions": ["a", "b"]}


def evaluation(version: int, *, final: bool) -> Evaluation:
    return Evaluation(version=version, greedy=0.5, sampled=None, n=4, final=final)


def test_workers_end_with_the_last_version_and_the_run_with_its_evaluation(desk: Desk) -> None:
    desk.join(CAROL, "relay")
    desk.pool.evaluated(evaluation(0, final=False))
    desk.publish(6)
    assert desk.beat(version=0).state == "finished" and desk.beat(VALIDATOR, 0).state == "finished"
    assert desk.beat(CAROL, 0).state == "running" and desk.pool.status().state == "running"
    desk.pool.evaluated(evaluation(6, final=True))
    assert desk.beat(CAROL, 0).state == "finished" and desk.pool.status().state == "finished"
    assert [e.version for e in desk.pool.status().evaluations] == [0, 6]


def test_the_status_counts_what_validators_counted(desk: Desk) -> None:
    desk.accepted(useful=(True, False))
    status = desk.pool.status()
    alice = next(node for node in status.nodes if node.name == "worker-a")
    assert (alice.accepted, alice.rejected, status.tokens_generated, status.have) == (1, 0, 20, 1)
    assert (status.step, status.steps, status.newest_version, status.started_s) == (0, 6, 0, 1_000.0)


# --- kill -9 ---------------------------------------------------------------------------------------------------------


def scenario(desk: Desk, die_at: int) -> None:
    """A run in small, during which the process dies inside the transaction of ledger entry `die_at`."""
    append = desk.pool.ledger.append

    def append_or_die(kind: str, body: Any) -> Any:
        entry = append(kind, body)
        if entry.seq == die_at:
            os._exit(9)
        return entry

    desk.pool.ledger.append = append_or_die  # type: ignore[method-assign]
    for key in (ALICE, BOB):
        desk.join(key)
    desk.join(VALIDATOR, "validator")
    desk.publish(0)
    desk.accepted()
    lied = desk.upload(BOB)
    desk.pool.claim(VALIDATOR)
    desk.judge(lied.id, Reason.PROOF)
    desk.accepted()
    desk.pool.trained(StepReport(step=0, metrics={}, trained=[]))
    desk.publish(1)


KINDS = [*["registered"] * 3, "policy", "accepted", "rejected", "slashed", "accepted", "trained", "policy"]


@pytest.mark.parametrize("die_at", [1, 5, 6, 7, 8, 9])
def test_killed_inside_a_transaction_the_pool_reopens_as_before_it(tmp_path: Path, die_at: int) -> None:
    path = tmp_path / "pool.sqlite"
    killed = multiprocessing.get_context("fork").Process(target=lambda: scenario(open_pool(path), die_at))
    killed.start()
    killed.join(30)
    assert killed.exitcode == 9
    desk = open_pool(path)
    whole = die_at - 1 - (die_at == 7)  # "rejected" and "slashed" are of one transaction
    assert desk.kinds() == KINDS[:whole]
    verify_chain(desk.pool.ledger.entries(), COORDINATOR.public)
    status = desk.pool.status()
    accepted = KINDS[:whole].count("accepted")
    in_batches = 4 if desk.pool.batch(0).ready else 0
    assert status.have + in_batches == 2 * accepted, "a group is credited exactly when its submission is accepted"
    assert sum(node.accepted for node in status.nodes) == accepted
    assert bool(status.slashed) == ("slashed" in KINDS[:whole])
    assert len(status.metrics) == KINDS[:whole].count("trained")
    if die_at in (5, 6, 8):  # it died with a verdict: the validator asks again, and is heard
        claim = desk.pool.claim(VALIDATOR)
        assert claim is not None
        desk.contents = 100
        desk.judge(claim.assignment.id)
        assert desk.kinds()[-1] == "accepted"


def test_a_pool_that_is_reopened_goes_on_where_it_was(tmp_path: Path) -> None:
    desk = open_pool(tmp_path / "pool.sqlite")
    scenario(desk, die_at=0)
    assert desk.kinds() == KINDS
    held = desk.task(version=1)
    before = desk.pool.status()
    desk.pool.db.close()
    again = open_pool(tmp_path / "pool.sqlite")
    assert again.pool.status() == before
    assert again.task(version=1) == held
    assert again.pool.batch(0).ready


def test_a_failing_ledger_leaves_no_trace_of_the_verdict(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    task = desk.upload()
    desk.pool.claim(VALIDATOR)

    def full(kind: str, body: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(desk.pool.ledger, "append", full)
        with pytest.raises(sqlite3.OperationalError):
            desk.judge(task.id)
    assert desk.pool.status().have == 0
    desk.judge(task.id)
    assert desk.pool.status().have == 2
