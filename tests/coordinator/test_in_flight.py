"""Workers with several tasks at once cannot choose among them. Workers that drain keep their tasks and their pay."""

import pytest

from shoal.coordinator.database import PoolError
from shoal.protocol.messages import Assignment, Finished, Heartbeat, HeartbeatAnswer

from .support import ALICE, BOB, Harness, staffed_pool

FILE = "9" * 64


def beat(harness: Harness, finished: str, *working_on: str, key: str = ALICE, version: int = 0) -> HeartbeatAnswer:
    """Request a task while uploading `finished` ("": nothing) and working on others."""
    announced = Finished(submission=finished, hash=FILE) if finished else None
    heartbeat = Heartbeat(policy_version=version, wants_task=True, finished=announced, working_on=list(working_on))
    return harness.pool.members.heartbeat(key, heartbeat)


@pytest.fixture
def proven(harness: Harness) -> Harness:
    harness.accepted(ALICE, useful=(False, False))
    return harness


def test_during_an_upload_a_worker_gets_one_more_task(proven: Harness) -> None:
    first = proven.task()
    second = beat(proven, first.id).assignment
    assert second is not None and second.number == first.number + 1
    assert beat(proven, first.id).assignment == second, "a repeated request must get the same task"
    proven.pool.assignments.uploaded(ALICE, first.id, FILE)
    proven.pool.assignments.uploaded(ALICE, second.id, FILE)


def test_only_the_announced_file_is_accepted(proven: Harness) -> None:
    """The file's content cannot depend on the later task. If the worker uploads another file, its task expires."""
    first = proven.task()
    beat(proven, first.id)
    with pytest.raises(PoolError, match="not the file that was announced"):
        proven.pool.assignments.uploaded(ALICE, first.id, "8" * 64)
    assert proven.state(first.id) == "expired" and missed(proven) == 1


def test_a_newcomer_gets_no_task_during_an_upload(harness: Harness) -> None:
    first = harness.task()
    answer = beat(harness, first.id)
    assert answer.assignment is None and f"its upload of {first.id}" in answer.waiting_for
    harness.publish(1)
    assert beat(harness, first.id, version=1).assignment is None
    assert harness.state(first.id) == "open", "newer weights must not end its upload"


def test_a_task_whose_announced_file_never_arrives_counts_as_missed(proven: Harness) -> None:
    first = proven.task()
    second = beat(proven, first.id).assignment
    assert second is not None
    beat(proven, second.id)  # it uploads one file at a time, so the first is lost
    assert (proven.state(first.id), proven.state(second.id)) == ("expired", "open")
    answer = beat(proven, second.id)
    assert f"its upload of {second.id}" in answer.waiting_for, "after a loss it must upload before it gets another task"
    assert missed(proven) == 1


def test_a_worker_restarted_during_an_upload_gets_the_same_task_again(proven: Harness) -> None:
    """The worker knows no later task, so it may upload another file."""
    first = alone(proven)
    assert proven.task() == first
    proven.pool.assignments.uploaded(ALICE, first.id, "8" * 64)
    assert not missed(proven)


def alone(harness: Harness) -> Assignment:
    """Return an announced task whose worker gets no later task, because the version is too old for another step."""
    harness.publish(1, 2)
    for _ in range(4):
        harness.accepted("b" * 64, 2)
    first = harness.task()
    assert "its upload of" in beat(harness, first.id, version=2).waiting_for
    return first


def test_another_workers_task_cannot_be_announced(proven: Harness) -> None:
    theirs = proven.task("b" * 64)
    beat(proven, theirs.id)
    proven.pool.assignments.uploaded("b" * 64, theirs.id, "8" * 64)


# --- draining --------------------------------------------------------------------------------------------------------


def test_a_draining_worker_finishes_its_tasks_and_leaves_without_penalty(proven: Harness) -> None:
    first = proven.task()
    second = beat(proven, first.id).assignment
    assert second is not None
    proven.pool.members.drain(ALICE)
    proven.pool.assignments.uploaded(ALICE, first.id, FILE)
    assert proven.task() == second, "a restart must not lose the task"
    proven.pool.assignments.uploaded(ALICE, second.id, FILE)
    assert proven.beat(ALICE).state == "left"
    assert (proven.beat(ALICE).state, proven.beat(ALICE).assignment) == ("left", None)
    assert not missed(proven) and not proven.node().suspensions
    proven.claim()
    proven.judge(first.id)
    assert proven.state(first.id) == "accepted", "its uploads must still be judged and paid"


def test_a_worker_killed_while_it_drained_returns_to_the_same_task(proven: Harness) -> None:
    """The worker is not punished. It gets no other task, because then it could choose which to upload."""
    first = proven.task()
    proven.pool.members.drain(ALICE)
    proven.join(ALICE)  # its next start
    assert proven.node().state == "active" and proven.task() == first and not missed(proven)
    proven.pool.assignments.uploaded(ALICE, first.id, FILE)
    assert proven.task().number == first.number + 1, "it must get tasks again without the operator"


def test_leaving_and_returning_ends_neither_a_rest_nor_a_suspension(proven: Harness) -> None:
    first = proven.task()
    beat(proven, first.id)
    with pytest.raises(PoolError, match="not the file that was announced"):
        proven.pool.assignments.uploaded(ALICE, first.id, "8" * 64)
    rests_until_s = proven.node().rests_until_s
    proven.pool.members.drain(ALICE)
    proven.join(ALICE)
    assert proven.node().rests_until_s == rests_until_s > proven.clock.now_s and missed(proven) == 1
    proven.pool.db.nodes.suspend(ALICE, "because", proven.clock.now_s)
    proven.pool.members.drain(ALICE)
    proven.join(ALICE)
    assert proven.node().state == "suspended"


def test_a_worker_that_left_may_return_but_its_suspension_continues(proven: Harness) -> None:
    proven.pool.members.drain(ALICE)
    assert proven.beat(ALICE).state == "left"
    proven.join(ALICE)
    assert proven.task().number == 1
    proven.pool.assignments.uploaded(ALICE, f"{ALICE[:16]}-000001", FILE)
    proven.pool.db.nodes.suspend(ALICE, "because", proven.clock.now_s)
    proven.pool.members.drain(ALICE)
    assert proven.beat(ALICE).state == "left"
    proven.join(ALICE)
    assert "suspension to end in 60 s" in proven.beat(ALICE).waiting_for


# --- several tasks at once -------------------------------------------------------------------------------------------


@pytest.fixture
def several() -> Harness:
    """Return a pool in which workers may generate three submissions at once. Alice has accepted work."""
    harness = staffed_pool(in_flight=3, prompts_per_step=16)
    harness.accepted(ALICE, useful=(False, False))
    return harness


def take(harness: Harness, count: int, version: int = 0) -> list[str]:
    """Request `count` tasks, each while working on the earlier ones. Return their ids."""
    held: list[str] = []
    for _ in range(count):
        assigned = beat(harness, "", *held, version=version).assignment
        assert assigned is not None
        held.append(assigned.id)
    return held


def outrun(harness: Harness, *versions: int) -> None:
    """Publish these versions, and let Bob fill batches with the last version while Alice is silent."""
    harness.publish(*versions)
    harness.clock.now_s += 31
    while harness.pool.db.open_step() < 3:
        harness.accepted(BOB, versions[-1])


def missed(harness: Harness, key: str = ALICE) -> int:
    return harness.node(key).missed_in_a_row


def test_a_worker_has_at_most_in_flight_tasks_and_one_more_during_an_upload(several: Harness) -> None:
    held = take(several, 3)
    assert len(set(held)) == 3
    answer = beat(several, "", *held)
    assert answer.assignment is None and f"its upload of {held[0]} to arrive" in answer.waiting_for
    fourth = beat(several, held[0], *held[1:]).assignment
    assert fourth is not None and fourth.id not in held
    assert beat(several, held[0], *held[1:], fourth.id).assignment is None
    for id in (*held, fourth.id):
        several.pool.assignments.uploaded(ALICE, id, FILE)
    assert not missed(several)


def test_a_newcomer_has_one_task(several: Harness) -> None:
    first = beat(several, "", key=BOB).assignment
    assert first is not None
    assert f"its upload of {first.id}" in beat(several, "", first.id, key=BOB).waiting_for


def test_submissions_are_uploaded_in_order(several: Harness) -> None:
    """Otherwise a worker could delay a task that it does not like, at no cost, until no batch can take it."""
    first, second = take(several, 2)
    beat(several, second, first)  # announces the second
    with pytest.raises(PoolError, match=f"{second} comes after {first}, which has to be uploaded first"):
        several.pool.assignments.uploaded(ALICE, second, FILE)
    several.pool.assignments.uploaded(ALICE, first, FILE)
    # Any file is allowed, because only the oldest task's file can be announced.
    several.pool.assignments.uploaded(ALICE, second, "8" * 64)


def test_a_restarted_worker_gets_all_its_tasks_again_in_order(several: Harness) -> None:
    held = take(several, 3)
    assert take(several, 3) == held and not missed(several)


@pytest.mark.parametrize("uploads", [False, True], ids=["tasks", "an upload and later tasks"])
def test_tasks_lost_together_count_once(several: Harness, uploads: bool) -> None:
    """The worker died while it worked on them, or during an upload, and returned with newer weights."""
    held = take(several, 3)
    if uploads:
        beat(several, *held)
    several.publish(1)
    beat(several, "", version=1)
    assert [several.state(id) for id in held] == ["expired"] * 3
    assert missed(several) == 1


def test_a_task_in_progress_may_take_longer_than_its_deadline(several: Harness) -> None:
    first, second = take(several, 2)
    several.clock.now_s += 601
    assert beat(several, "", first, second).assignment is not None
    assert several.state(first) == several.state(second) == "open"
    beat(several, "", second)
    assert (several.state(first), several.state(second)) == ("expired", "open"), (
        "only the task that it lost must expire"
    )


def test_a_slow_worker_with_several_tasks_has_missed_none(several: Harness) -> None:
    """Other workers filled the batches. All tasks of the slow worker are too old, so it cannot choose among them."""
    first, second = take(several, 2)
    beat(several, first, second)
    outrun(several, 1, 2, 3)
    assert "to load version 3" in beat(several, first, second).waiting_for
    for id in (first, second):
        with pytest.raises(PoolError, match="older than"):
            several.pool.assignments.uploaded(ALICE, id, FILE)
    assert several.state(first) == several.state(second) == "stale" and not missed(several)


def test_an_upload_in_progress_does_not_count_as_missed_when_its_version_becomes_too_old(several: Harness) -> None:
    """Other workers filled the batches, or the machine is slow. Neither is the worker's fault."""
    (first,) = take(several, 1)
    several.publish(1)
    newer = beat(several, first, version=1).assignment
    assert newer is not None and newer.policy_version == 1, "the next task must be for the newer version"
    outrun(several, 2, 3)
    beat(several, first, newer.id, version=1)
    assert several.state(first) == "stale" and not missed(several)


def test_a_finished_file_may_arrive_after_its_deadline(several: Harness) -> None:
    """The worker has a later task, and requests more during the upload."""
    first, second = take(several, 2)
    several.clock.now_s += 601
    beat(several, first, second)
    assert several.state(first) == "open" and not missed(several)
    several.pool.assignments.uploaded(ALICE, first, FILE)
