"""Uploading one submission while generating the next: two tasks at most, and nothing to choose between them."""

import pytest

from shoal.coordinator.standing import states
from shoal.coordinator.state.database import PoolError
from shoal.protocol.messages import Assignment, Finished, Heartbeat, HeartbeatAnswer

from ..support import ALICE, Harness

FILE = "9" * 64


def beat(harness: Harness, finished: str, key: str = ALICE, version: int = 0) -> HeartbeatAnswer:
    said = Finished(submission=finished, hash=FILE)
    return harness.pool.members.heartbeat(key, Heartbeat(policy_version=version, wants_task=True, finished=said))


@pytest.fixture
def proven(harness: Harness) -> Harness:
    harness.accepted(ALICE, useful=(False, False))
    return harness


def test_who_uploads_gets_the_next_task_and_no_third(proven: Harness) -> None:
    first = proven.task()
    second = beat(proven, first.id).assignment
    assert second is not None and second.number == first.number + 1
    assert beat(proven, first.id).assignment == second, "however often it asks"
    proven.pool.submissions.uploaded(ALICE, first.id, FILE)
    proven.pool.submissions.uploaded(ALICE, second.id, FILE)


def test_only_the_announced_file_is_taken(proven: Harness) -> None:
    """What it is can no longer follow from the task that came after it."""
    first = proven.task()
    beat(proven, first.id)
    with pytest.raises(PoolError, match="not the file that was announced"):
        proven.pool.submissions.uploaded(ALICE, first.id, "8" * 64)
    assert proven.state(first.id) == "open"


def test_a_young_key_uploads_first(harness: Harness) -> None:
    first = harness.task()
    answer = beat(harness, first.id)
    assert answer.assignment is None and f"its upload of {first.id}" in answer.waiting_for
    harness.publish(1)
    assert beat(harness, first.id, version=1).assignment is None
    assert harness.state(first.id) == "open", "newer weights do not end what it uploads"


def test_what_was_announced_and_never_came_is_missed(proven: Harness) -> None:
    first = proven.task()
    second = beat(proven, first.id).assignment
    assert second is not None
    beat(proven, second.id)  # it uploads one at a time: the first is lost
    assert (proven.state(first.id), proven.state(second.id)) == ("expired", "open")
    answer = beat(proven, second.id)
    assert f"its upload of {second.id}" in answer.waiting_for, "who lost one uploads before it gets another"
    assert {node.name: node.missed for node in proven.pool.status().nodes}["worker-a"] == 1


def test_who_is_restarted_during_an_upload_gets_the_same_task_again(proven: Harness) -> None:
    """It has seen no other, so it may upload another file: its own signature is as good on that one."""
    first = alone(proven)
    assert proven.task() == first
    proven.pool.submissions.uploaded(ALICE, first.id, "8" * 64)
    node = proven.pool.db.nodes.get(ALICE)
    assert node is not None and not node.missed_in_a_row


def alone(harness: Harness) -> Assignment:
    """An announced task of a worker that gets no other meanwhile, because its version will not do for another step."""
    harness.publish(1, 2)
    for _ in range(4):
        harness.accepted("b" * 64, 2)
    first = harness.task()
    assert "its upload of" in beat(harness, first.id).waiting_for
    return first


def test_an_upload_that_takes_too_long_is_no_offence_if_there_was_no_later_task(proven: Harness) -> None:
    first = alone(proven)
    for _ in range(2):
        proven.accepted("b" * 64, 2)
    beat(proven, first.id, version=2)
    node = proven.pool.db.nodes.get(ALICE)
    assert proven.state(first.id) == "stale" and node is not None and not node.missed_in_a_row


def test_another_workers_task_cannot_be_announced(proven: Harness) -> None:
    theirs = proven.task("b" * 64)
    beat(proven, theirs.id)
    proven.pool.submissions.uploaded("b" * 64, theirs.id, "8" * 64)


def test_a_worker_that_drains_finishes_what_it_holds_and_leaves_without_penalty(proven: Harness) -> None:
    first = proven.task()
    second = beat(proven, first.id).assignment
    assert second is not None
    proven.pool.members.drain(ALICE)
    proven.pool.submissions.uploaded(ALICE, first.id, FILE)
    assert proven.task() == second, "a restart does not lose it"
    proven.pool.submissions.uploaded(ALICE, second.id, FILE)
    assert proven.beat(ALICE).state == "left"
    assert (proven.beat(ALICE).state, proven.beat(ALICE).assignment) == ("left", None)
    node = proven.pool.db.nodes.get(ALICE)
    assert node is not None and not node.missed_in_a_row and not node.suspensions
    proven.claim()
    proven.judge(first.id)
    assert proven.state(first.id) == "accepted", "what it left is judged and paid"


def test_who_left_may_come_back_but_not_out_of_a_suspension(proven: Harness) -> None:
    proven.pool.members.drain(ALICE)
    assert proven.beat(ALICE).state == "left"
    proven.join(ALICE)
    assert proven.task().number == 1
    proven.pool.submissions.uploaded(ALICE, f"{ALICE[:16]}-000001", FILE)
    proven.pool.db.nodes.suspend_until(ALICE, proven.clock.now_s + 60)
    states.move(proven.pool.db.nodes, ALICE, "suspend", "because", proven.clock.now_s)
    proven.pool.members.drain(ALICE)
    assert proven.beat(ALICE).state == "left"
    proven.join(ALICE)
    assert "suspension to end in 60 s" in proven.beat(ALICE).waiting_for
