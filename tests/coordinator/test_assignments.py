import pytest

from shoal.coordinator.assignment import DEADLINE_S, assignment_nonce, nonce_secret
from shoal.coordinator.database import PoolError
from shoal.coordinator.submissions import HELD_S
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Reason

from .support import (
    ALICE,
    BOB,
    CAROL,
    COORDINATOR,
    OTHER_VALIDATOR,
    VALIDATOR,
    Harness,
    advance,
    open_pool,
    staffed_pool,
)

pytestmark = pytest.mark.usefixtures("every_database_slow")


def test_a_worker_that_requests_a_task_gets_one_of_its_version(harness: Harness) -> None:
    task = harness.task()
    assert (task.number, task.step, task.policy_version, task.groups) == (0, 0, 0, 2)
    assert task.id == f"{ALICE[:16]}-000000" and task.policy_digest == f"{0:064x}"
    kept = harness.pool.db.submissions.get(task.id)
    assert kept is not None and kept.deadline_s == harness.clock.now_s + DEADLINE_S
    assert harness.beat(BOB, wants=False).assignment is None
    assert harness.beat(VALIDATOR, 0).assignment is None


@pytest.mark.parametrize(
    "loaded, reason",
    [(None, "this worker to load version 0"), (1, "which this worker reports as loaded, to be published")],
)
def test_a_worker_without_a_published_version_waits(harness: Harness, loaded: int | None, reason: str) -> None:
    answer = harness.beat(ALICE, loaded)
    assert answer.assignment is None and reason in answer.waiting_for
    empty = open_pool()
    empty.join(ALICE)
    assert empty.beat(ALICE, None).waiting_for == "the learner to publish version 0"


def test_rollouts_run_ahead_of_the_learner_by_the_async_level_and_no_further(harness: Harness) -> None:
    advance(harness, 2)
    assert harness.task(version=0).step == 2, "the task must be for step 2, which may train on version 0"
    harness.pool.assignments.uploaded(ALICE, harness.task(version=0).id, "9" * 64)
    harness.claim(VALIDATOR)
    harness.judge(f"{ALICE[:16]}-000004")
    harness.accepted(version=0)
    assert harness.beat(version=0).waiting_for == "the learner to publish version 1"


def test_a_worker_with_too_old_weights_waits_until_it_has_loaded_newer_ones(harness: Harness) -> None:
    advance(harness, 3)
    harness.publish(1, 2)
    assert harness.beat(version=0).waiting_for == "this worker to load version 2"
    assert harness.task(version=1).policy_version == 1, "an older version within the async level must be allowed"


def test_an_async_level_of_zero_allows_only_the_version_of_the_step() -> None:
    harness = staffed_pool(workers=(ALICE,), validators=(VALIDATOR,), async_level=0)
    advance(harness, 1)
    assert "publish version 1" in harness.beat(version=0).waiting_for
    harness.publish(1)
    assert "load version 1" in harness.beat(version=0).waiting_for
    assert harness.task(version=1).step == 1


def test_a_restarted_worker_gets_its_task_again_even_if_enough_work_is_in_progress(harness: Harness) -> None:
    first, _ = harness.task(ALICE), harness.task(BOB)
    harness.join(CAROL)
    assert "catch up" in harness.beat(CAROL, 0).waiting_for
    harness.clock.now_s += 40
    assert harness.task(ALICE) == first, "the task or its deadline changed"


def test_a_newer_version_ends_the_open_task_and_gives_the_next_number(harness: Harness) -> None:
    first = harness.task()
    harness.publish(1)
    assert "missed tasks in a row: 1" in harness.beat(version=1).waiting_for
    harness.clock.now_s += 600
    second = harness.task(version=1)
    assert (second.number, second.policy_version) == (1, 1)
    with pytest.raises(PoolError, match="expired, not open"):
        harness.pool.assignments.uploaded(ALICE, first.id, "9" * 64)


def test_a_worker_cannot_draw_other_tasks_by_going_back_to_an_older_version(harness: Harness) -> None:
    harness.publish(1)
    first = harness.task(version=1)
    assert harness.beat(version=0).waiting_for == "this worker to load version 1"
    assert harness.task(version=1) == first
    harness.pool.assignments.uploaded(ALICE, first.id, "9" * 64)
    assert harness.beat(version=0).waiting_for == "this worker to load version 1", "it got a task of an older version"


# --- back-pressure ---------------------------------------------------------------------------------------------------


def test_uploaded_and_claimed_work_counts_as_in_progress_and_rejected_work_does_not(harness: Harness) -> None:
    harness.upload(ALICE)
    harness.upload(BOB)
    assert "catch up" in harness.beat(ALICE, 0).waiting_for
    claim = harness.claimed()
    assert "catch up" in harness.beat(ALICE, 0).waiting_for
    harness.judge(claim.assignment.id, Reason.UNREADABLE)
    assert harness.task(ALICE).number == 1


def test_a_batch_waits_only_for_a_moment_for_work_that_a_validator_holds() -> None:
    harness = staffed_pool(prompts_per_step=2)
    harness.upload()
    harness.claimed()
    assert harness.beat(BOB).assignment is None, "at first a verdict is to be expected"
    harness.clock.now_s += HELD_S + 1
    harness.beat(OTHER_VALIDATOR, wants=False)
    assert harness.beat(BOB).assignment is not None


def test_a_batch_does_not_wait_for_work_in_doubt() -> None:
    harness = staffed_pool(prompts_per_step=2)
    id = harness.upload().id
    harness.claimed()
    assert harness.beat(BOB).assignment is None
    harness.judge(id, Reason.PROOF, confirmed=False)
    assert harness.beat(BOB).assignment is not None


def test_more_tasks_are_assigned_if_few_groups_are_useful(harness: Harness) -> None:
    harness.join(CAROL)
    harness.accepted(useful=(True, False))  # half are useful, so 3 more useful groups need 3 submissions
    for key in (ALICE, BOB, CAROL):
        harness.task(key)
    harness.join("d" * 64)
    assert "catch up" in harness.beat("d" * 64, 0).waiting_for


def test_a_silent_workers_task_does_not_count_as_in_progress(harness: Harness) -> None:
    harness.join(CAROL)
    silent = harness.task(ALICE)
    harness.task(BOB)
    harness.clock.now_s += 31
    harness.beat(BOB, 0, wants=False)
    assert harness.task(CAROL).number == 0
    harness.pool.assignments.uploaded(ALICE, silent.id, "9" * 64)  # Alice was only slow, so the upload is still allowed


# --- nonces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [{"run": "r1"}, {"worker": BOB}, {"number": 1}, {"version": 1}, {"secret": b"t"}])
def test_any_other_assignment_has_another_nonce(changed: dict[str, object]) -> None:
    names = {"secret": b"s", "run": "r", "worker": ALICE, "number": 0, "version": 0}
    nonce = assignment_nonce(**names)  # type: ignore[arg-type]
    assert nonce == assignment_nonce(**names) and len(nonce) == 32  # type: ignore[arg-type]
    assert nonce != assignment_nonce(**(names | changed))  # type: ignore[arg-type]
    assert nonce_secret(COORDINATOR) == nonce_secret(Identity(COORDINATOR.private_key))
    assert nonce_secret(COORDINATOR) != nonce_secret(Identity.generate())
