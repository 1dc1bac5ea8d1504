"""A suspended key gets no tasks for a while: it stays a member, the reason is shown, and it ends by itself."""

import pytest

from shoal.coordinator.nodes import FORGET_S, MOST_S
from shoal.protocol.messages import Reason

from .support import ALICE, BOB, Harness, metrics_of

pytestmark = pytest.mark.usefixtures("every_database_slow")


def test_a_suspended_worker_gets_no_task_until_its_time_is_over(harness: Harness) -> None:
    until_s = harness.pool.db.nodes.suspend(ALICE, "3 tasks expired", harness.clock.now_s, 60)
    assert until_s == harness.clock.now_s + 60
    answer = harness.beat(ALICE)
    assert (answer.state, answer.assignment) == ("running", None)
    assert answer.waiting_for == "its suspension to end in 60 s (3 tasks expired)"
    assert harness.task(BOB), "another key is not concerned"
    harness.clock.now_s = until_s - 0.5
    assert harness.beat(ALICE).assignment is None
    harness.clock.now_s = until_s
    assert harness.task(ALICE).number == 0
    assert harness.kinds().count("slashed") == 0


def test_the_task_that_it_holds_may_still_be_uploaded(harness: Harness) -> None:
    task = harness.task(ALICE)
    harness.pool.db.nodes.suspend(ALICE, "why", harness.clock.now_s, 60)
    harness.pool.assignments.uploaded(ALICE, task.id, "9" * 64)
    claim = harness.claim()
    assert claim is not None and claim.assignment == task


def test_each_suspension_is_twice_as_long_as_the_one_before_up_to_a_limit(harness: Harness) -> None:
    lengths = []
    for _ in range(12):
        until_s = harness.pool.db.nodes.suspend(ALICE, "why", harness.clock.now_s, 60)
        lengths.append(until_s - harness.clock.now_s)
        harness.clock.now_s = until_s
    assert lengths[:4] == [60, 120, 240, 480]
    assert lengths[-1] == MOST_S and lengths == sorted(lengths)


def test_an_old_suspension_is_forgotten(harness: Harness) -> None:
    until_s = harness.pool.db.nodes.suspend(ALICE, "why", harness.clock.now_s, 60)
    harness.clock.now_s = until_s + FORGET_S
    assert harness.pool.db.nodes.suspend(ALICE, "why", harness.clock.now_s, 60) == harness.clock.now_s + 120
    harness.clock.now_s += 121 + FORGET_S
    assert harness.pool.db.nodes.suspend(ALICE, "why", harness.clock.now_s, 60) == harness.clock.now_s + 60


def test_status_and_metrics_show_it_while_it_lasts(harness: Harness) -> None:
    harness.pool.db.nodes.suspend(ALICE, "3 tasks expired", harness.clock.now_s, 60)
    harness.clock.now_s += 20

    def shown() -> dict[str, tuple[float, str]]:
        return {node.name: (node.suspended_s, node.suspension) for node in harness.status().nodes}

    assert shown()["worker-a"] == (pytest.approx(40), "3 tasks expired") and shown()["worker-b"] == (0, "")
    assert metrics_of(harness.metrics())["shoal_suspended_nodes"] == 1
    harness.clock.now_s += 40
    assert shown()["worker-a"] == (0, "")
    assert metrics_of(harness.metrics())["shoal_suspended_nodes"] == 0


def reject(harness: Harness, reason: Reason, key: str = ALICE) -> None:
    task = harness.upload(key)
    assert harness.claim() is not None
    harness.judge(task.id, reason)


@pytest.mark.parametrize("reason", [Reason.UNREADABLE, Reason.BOUNDS, Reason.SIGNATURE, Reason.CONTEXT])
def test_who_sends_unusable_files_gets_fewer_and_fewer_tasks(harness: Harness, reason: Reason) -> None:
    """101 files of one byte each cost a validator as many readings, and their sender nothing."""
    sent, started_s = 0, harness.clock.now_s
    while harness.clock.now_s < started_s + 24 * 3600:
        if harness.beat(ALICE).assignment is None:
            harness.clock.now_s += 60
            harness.beat(BOB, wants=False)
            continue
        reject(harness, reason)
        sent += 1
    assert 2 < sent < 20
    assert "slashed" not in harness.kinds() and harness.pool.members.role(ALICE) == "worker"
    assert f"of its newest 20 files were {reason.value}" in harness.beat(ALICE).waiting_for


def test_one_unusable_file_among_many_is_an_accident(harness: Harness) -> None:
    for _ in range(3):
        reject(harness, Reason.UNREADABLE)
        for _ in range(20):
            harness.accepted(useful=(False, False))
    assert harness.beat(ALICE).assignment is not None


def test_what_a_program_printed_suspends_nobody(harness: Harness) -> None:
    for _ in range(5):
        reject(harness, Reason.UNREPEATABLE)
    assert harness.beat(ALICE).assignment is not None
