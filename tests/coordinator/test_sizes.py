"""Task sizes for workers of any speed: each needs about the same time, none delays a step, and little work is wasted."""

import statistics

import pytest

from shoal.config import config as config_module
from shoal.coordinator.arrivals import SIMILAR, fitted_size, max_size

from . import simulation
from .simulation import Simulation, workers
from .support import ALICE, BOB, Harness, config, open_pool

CONFIG = config()
BASE, MOST = CONFIG.workers.groups_per_submission, CONFIG.workers.largest


@pytest.mark.parametrize(
    "size, took_s, expected",
    [
        (BASE, 10.0, BASE),
        (BASE, 10.0 * SIMILAR - 0.01, BASE),
        (MOST, 40.0, MOST // 4),
        (BASE, 1_000.0, 1),
        (BASE, 5.0, 2 * BASE),
        (BASE, 0.1, 2 * BASE),  # and no more at once: the time of so small a task may be all overhead
        (MOST, 0.1, MOST),
        (1, 10.0, 2),  # as fast as the others with a small task: it may have become faster
    ],
)
def test_a_size_follows_the_time_that_tasks_take(size: int, took_s: float, expected: int) -> None:
    assert fitted_size(size, took_s, 10.0, CONFIG) == expected


def test_a_worker_that_became_faster_gets_tasks_twice_as_large_up_to_the_usual_size() -> None:
    eight = CONFIG.model_copy(update={"workers": CONFIG.workers.model_copy(update={"groups_per_submission": 8})})
    assert [fitted_size(size, 10.0, 10.0, eight) for size in (1, 3, 5)] == [2, 6, 8]


def test_the_largest_task_fits_into_an_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max_size(CONFIG) == MOST
    monkeypatch.setattr(config_module, "SUBMISSION_BYTES", 100_000)  # 16 completions of 64 tokens: 26,624 bytes at most
    assert max_size(CONFIG) == fitted_size(BASE, 1.0, 10.0, CONFIG) == 3
    monkeypatch.setattr(config_module, "SUBMISSION_BYTES", 1024)
    assert max_size(CONFIG) == BASE and CONFIG.max_submission_bytes == BASE * 26_624, "a newcomer's task always fits"


def mixed(seed: int, **settings: object) -> Simulation:
    """Two workers that need 0.1 s per group, and one that needs 1 s."""
    members = workers(3)
    for member, group_s in zip(members, (0.1, 0.1, 1.0), strict=True):
        member.takes_s, member.group_s = 0.2, group_s
    chosen = {"prompts_per_step": 32} | settings
    return Simulation(members, seed, settings=chosen, useful=0.6, groups=8)


def test_one_worker_ten_times_slower_delays_no_step_and_is_credited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "STEPS", 20)
    pool = mixed(0)
    with_slow_s = pool.run()
    slow = pool.members[2].key
    counts = pool.harness.pool.db.submissions.count_by_worker_and_state()
    assert counts[slow, "accepted"] >= 10 and not counts.get((slow, "expired"))
    assert counts.get((slow, "stale"), 0) <= 1, "its first task, before its speed is known"
    two = mixed(0)
    two.members.pop()
    assert with_slow_s <= 1.05 * two.run(), "the pool is not slower than without it"
    nodes = [pool.harness.node(member.key) for member in pool.members]
    assert nodes[2].size <= nodes[0].size / 4
    assert nodes[2].missed_in_a_row == 0 and not nodes[2].suspensions and 0.9 < nodes[2].took_s < 1.6


def test_a_laptop_and_a_large_node_finish_their_tasks_in_about_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "STEPS", 40)
    members = workers(4)
    for member, group_s in zip(members, (0.4, 0.4, 0.4, 0.05), strict=True):
        member.takes_s, member.group_s = 0.1, group_s
    pool = Simulation(members, 0, settings={"prompts_per_step": 128}, groups=8)
    pool.run()
    took_s = [statistics.median(member.took[len(member.took) // 2 :]) for member in members]
    assert max(took_s) < 2 * min(took_s), took_s


@pytest.mark.parametrize("async_level, learn_s", [(2, 1.0), (2, 6.0), (1, 3.0)])
def test_less_than_three_percent_of_the_groups_are_wasted(
    async_level: int, learn_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Useful groups that became too old or were uploaded too late, as the summary counts them."""
    monkeypatch.setattr(simulation, "STEPS", 40)
    monkeypatch.setattr(simulation, "LEARN_S", learn_s)
    pool = Simulation(
        workers(2, 0.3), 0, settings={"prompts_per_step": 32, "async_level": async_level}, useful=0.6, groups=16
    )
    for member in pool.members:
        member.group_s = 0.1
    pool.run()
    status = pool.harness.status()
    made = status.useful_groups + status.late_groups
    assert status.step == 40 and made > 40 * 32 - 1
    assert status.stale_groups + status.late_groups < 0.03 * made, (status.stale_groups, status.late_groups, made)


def test_no_groups_are_requested_that_the_next_batch_could_not_use() -> None:
    harness = open_pool(async_level=0)
    for key in (ALICE, BOB):
        harness.join(key)
    harness.join("e" * 64, "validator")
    harness.publish(0)
    harness.accepted(ALICE, useful=(True, False))  # half of the groups are useful, and three of four are missing
    assert (harness.task(ALICE).groups, harness.task(BOB).groups) == (2, 2)
    harness.accepted(ALICE, useful=(True, True))
    assert harness.state(f"{BOB[:16]}-000000") == "open"
    assert "catch up" in harness.beat(ALICE, 0).waiting_for


def test_after_a_late_upload_the_next_task_is_smaller(harness: Harness) -> None:
    harness.accepted(BOB)
    task = harness.task(ALICE)
    harness.clock.now_s += 50
    for version in (1, 2, 3):
        harness.publish(version)
        for _ in range(2):
            harness.accepted(BOB, version)
    with pytest.raises(Exception, match="older than"):
        harness.pool.assignments.may_upload(ALICE, task.id)
    assert harness.state(task.id) == "stale" and harness.status().late_groups == 2
    assert harness.task(ALICE, 3).groups == 1
