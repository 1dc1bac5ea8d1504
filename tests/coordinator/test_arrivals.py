"""Late and missed tasks, and task sizes: whole pools in virtual time, and each rule alone."""

import random
import statistics

import pytest

from shoal.config import config as config_module
from shoal.coordinator import arrivals
from shoal.coordinator.arrivals import SIMILAR, fitted_size, max_size
from shoal.coordinator.pool import Pool

from . import simulation
from .simulation import Simulation, silent, workers
from .support import ALICE, BOB, CAROL, VALIDATOR, Harness, config, staffed_pool

CONFIG = config()
BASE, MAX = CONFIG.workers.groups_per_submission, CONFIG.workers.largest
DAVE, ERIN = "d" * 64, "1" * 64
USELESS = (False, False)  # fills no batch, so that any number can be accepted

# Largest slowdown by number of silent keys. Measured for 1, 2 and 5 of them: 6, 19 and 30 % over 12 steps and three
# seeds; 1, 4 and 16 % over 40 steps; 930, 1,700 and 2,850 % when a task counted as in progress until a fixed deadline.
SLOWER_BY = {1: 0.2, 2: 0.35, 5: 0.5}


@pytest.mark.parametrize("held_by", SLOWER_BY)
def test_silent_keys_among_eight_hardly_slow_the_run(held_by: int) -> None:
    """Compare with a pool that has only the honest workers."""
    honest = sum(Simulation(workers(8 - held_by), seed).run() for seed in range(3))
    pools = [Simulation(silent(held_by) + workers(8 - held_by), seed) for seed in range(3)]
    assert sum(pool.run() for pool in pools) <= (1 + SLOWER_BY[held_by]) * honest
    for pool in pools:
        assert pool.open_step() == simulation.STEPS


@pytest.mark.parametrize("settings", [{}, {"in_flight": 4, "prompts_per_step": 40}], ids=["one", "four in flight"])
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 100), marks=pytest.mark.slow)])
def test_no_honest_worker_is_slashed_or_suspended(
    seeds: range, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate many pools with mixed speeds, crashing workers, lost uploads and a coordinator that restarts."""
    monkeypatch.setattr(simulation, "STEPS", 6)
    for seed in seeds:
        draw = random.Random(seed)
        members = workers(draw.randint(3, 8))
        for member in members:
            member.takes_s = draw.choice([0.5, 1.0, 2.0, 4.0, 20.0])
            member.crashes, member.loses = draw.choice([0.0, 0.03, 0.1]), draw.choice([0.0, 0.05])
        pool = Simulation(members, seed, settings=settings)
        for at in range(3):
            pool.after(draw.uniform(0, 20) + 10 * at, lambda pool=pool: restart(pool.harness))  # type: ignore[misc]
        pool.run()
        nodes = pool.harness.pool.db.nodes.all()
        assert pool.open_step() == 6, seed
        assert not [node.name for node in nodes if node.evicted or node.suspensions], seed
        assert "slashed" not in pool.harness.kinds()


def restart(harness: Harness) -> None:
    """Restart the coordinator as after kill -9: only the database is left."""
    old = harness.pool
    harness.pool = Pool(old.db.connection, old.db.ledger, old.config, old.run, harness.clock, secret=b"secret")


# --- each rule alone -------------------------------------------------------------------------------------------------


def proven(harness: Harness, key: str, takes_s: float, times: int = 4) -> None:
    """Have a few submissions of a worker accepted."""
    for _ in range(times):
        task = harness.task(key)
        harness.clock.now_s += takes_s
        harness.pool.assignments.uploaded(key, task.id, "9" * 64)
        harness.claim()
        harness.judge(task.id, None, USELESS)


def beat_all(harness: Harness, *keys: str) -> None:
    for key in keys:
        harness.beat(key, 0, wants=False)


@pytest.fixture
def pool() -> Harness:
    """Return a pool whose batches need two tasks. Alice and Bob have accepted work and need 4 s per task."""
    harness = staffed_pool(
        workers=(ALICE, BOB, CAROL, DAVE, ERIN), validators=(), prompts_per_step=4, online_filter=True
    )
    for key in (ALICE, BOB):
        proven(harness, key, 4.0)
    harness.pool.db.connection.change("UPDATE groups SET useful = TRUE, stale = TRUE")  # makes the useful share 1
    return harness


def test_work_is_assigned_again_after_twice_its_workers_usual_time(pool: Harness) -> None:
    pool.task(ALICE)
    pool.task(BOB)
    assert "catch up" in pool.beat(CAROL, 0).waiting_for
    pool.clock.now_s += arrivals.LATE * 4.0 + 0.01
    beat_all(pool, ALICE, BOB)
    assert pool.task(CAROL)
    assert pool.task(ALICE).number == 4, "the late worker must keep its task"


def test_a_slower_workers_task_counts_as_in_progress_for_longer_up_to_a_limit(pool: Harness) -> None:
    node = pool.pool.db.nodes
    node.timeout_s = 1.0  # so Alice, who stays silent, counts as gone, and her task does not count
    node.set(BOB, took_s=12.0, missed=0.0, missed_in_a_row=0, rests_until_s=0.0)
    pool.task(ALICE)
    pool.task(BOB)
    pool.clock.now_s += 23.0
    pool.beat(BOB, 0, wants=False)
    assert pool.pool.assignments.arrivals.groups_open() == (2, 0)
    node.set(BOB, took_s=1e6, missed=0.0, missed_in_a_row=0, rests_until_s=0.0)
    node.set(CAROL, took_s=4.0, missed=0.0, missed_in_a_row=0, rests_until_s=0.0)
    pool.clock.now_s += arrivals.LATE * arrivals.MAX_SLOWDOWN * 4.0
    pool.beat(BOB, 0, wants=False)
    assert pool.pool.assignments.arrivals.groups_open() == (0, 0)


def test_newcomers_never_have_all_the_work_while_a_worker_with_accepted_work_is_live(pool: Harness) -> None:
    beat_all(pool, ALICE)
    assert pool.task(CAROL)
    assert "catch up" in pool.beat(DAVE, 0).waiting_for, (
        "half of the batch must stay reserved for workers with accepted work"
    )
    assert pool.task(ALICE)


def test_without_accepted_work_in_the_pool_newcomers_get_all_the_work() -> None:
    harness = staffed_pool(workers=(ALICE, BOB, CAROL), validators=())
    assert harness.task(ALICE) and harness.task(BOB)
    assert "catch up" in harness.beat(CAROL, 0).waiting_for
    harness.clock.now_s += arrivals.LATE * arrivals.START_S + 0.01
    assert harness.task(CAROL), "the newcomers' tasks must soon count as late"


def miss(harness: Harness, key: str) -> float:
    """Get a task, request another after its deadline, and rest. Return the seconds of rest."""
    harness.task(key)
    harness.clock.now_s += 601.0
    assert "tasks in a row" in harness.beat(key, 0).waiting_for
    node = harness.node(key)
    rest_s = max(node.rests_until_s, node.suspended_until_s) - harness.clock.now_s
    harness.clock.now_s += rest_s
    return rest_s


def test_a_worker_that_misses_tasks_rests_longer_each_time_and_is_suspended(pool: Harness) -> None:
    rests = []
    while not (node := pool.node()).suspensions:
        rests.append(miss(pool, ALICE))
    assert len(rests) == 5 and rests[0] < 16 and all(b > 1.9 * a for a, b in zip(rests[:3], rests[1:4], strict=True))
    assert node.missed_in_a_row == 5 and node.reason == "5 tasks in a row were not uploaded"
    assert {shown.name: shown.missed for shown in pool.status().nodes}["worker-a"] == 5
    for _ in range(4):
        miss(pool, CAROL)
    assert pool.node(CAROL).suspensions == 1, "a new key must be suspended after four missed tasks"


def test_a_worker_does_not_rest_for_a_task_that_it_lost_when_the_run_stopped(pool: Harness) -> None:
    lost = pool.task()
    pool.clock.now_s += 601.0
    restart(pool)
    pool.publish(1)
    assert pool.task(version=1).id != lost.id, "a resumed run must give its restarted workers tasks at once"
    assert (pool.state(lost.id), pool.node().missed_in_a_row) == ("expired", 0)
    pool.clock.now_s += 601.0
    assert "missed tasks in a row: 1" in pool.beat(version=1).waiting_for, (
        "only tasks from before the start are excused"
    )


def test_accepted_work_ends_the_rest_but_erases_only_part_of_the_missed_share(pool: Harness) -> None:
    miss(pool, ALICE)
    miss(pool, ALICE)
    before = pool.node()
    proven(pool, ALICE, 4.0, times=1)
    after = pool.node()
    assert (before.missed_in_a_row, after.missed_in_a_row, after.rests_until_s) == (2, 0, 0)
    assert after.missed == pytest.approx(before.missed * (1 - arrivals.SHARE_WEIGHT))


def test_a_worker_that_reports_several_versions_in_turn_gets_one_task_and_then_a_rest(pool: Harness) -> None:
    """The worker never gets three tasks at once to choose from."""
    pool.publish(1, 2)
    tasks = {assignment.id for version in (0, 1, 2, 0, 1) if (assignment := pool.beat(ALICE, version).assignment)}
    assert len(tasks) == 1
    assert "missed tasks in a row: 1" in pool.beat(ALICE, 2).waiting_for
    pool.clock.now_s += 600
    later = {assignment.id for version in (2, 1, 0) if (assignment := pool.beat(ALICE, version).assignment)}
    assert len(later) == 1 and later != tasks


# --- task sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, took_s, expected",
    [
        (BASE, 10.0, BASE),
        (BASE, 10.0 * SIMILAR - 0.01, BASE),
        (MAX, 40.0, MAX // 4),
        (BASE, 1_000.0, 1),
        (BASE, 5.0, 2 * BASE),
        (BASE, 0.1, 2 * BASE),  # at most doubled, because the time of such a small task may be all overhead
        (MAX, 0.1, MAX),
        (1, 10.0, 2),  # doubled although the time is the median, because the worker may have become faster
    ],
)
def test_a_task_size_follows_the_time_that_tasks_take(size: int, took_s: float, expected: int) -> None:
    assert fitted_size(size, took_s, 10.0, CONFIG) == expected


def test_a_worker_that_became_faster_gets_tasks_twice_as_large_up_to_the_usual_size() -> None:
    eight = CONFIG.model_copy(update={"workers": CONFIG.workers.model_copy(update={"groups_per_submission": 8})})
    assert [fitted_size(size, 10.0, 10.0, eight) for size in (1, 3, 5)] == [2, 6, 8]


def test_the_largest_task_fits_into_an_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max_size(CONFIG) == MAX
    monkeypatch.setattr(config_module, "SUBMISSION_BYTES", 100_000)  # a group needs at most 26,624 bytes
    assert max_size(CONFIG) == fitted_size(BASE, 1.0, 10.0, CONFIG) == 3
    monkeypatch.setattr(config_module, "SUBMISSION_BYTES", 1024)
    assert max_size(CONFIG) == BASE and CONFIG.max_submission_bytes == BASE * 26_624, "a newcomer's task must fit"


def mixed(seed: int, **settings: object) -> Simulation:
    """Return a pool with two workers that need 0.1 s per group and one that needs 1 s."""
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
    assert counts.get((slow, "stale"), 0) <= 1, (
        "only its first task, assigned before its speed was known, may become stale"
    )
    two = mixed(0)
    two.members.pop()
    assert with_slow_s <= 1.05 * two.run(), "the slow worker made the pool slower"
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
    """Wasted groups are useful groups that became too old or were uploaded too late, as in a run's summary."""
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
    harness = staffed_pool(validators=(VALIDATOR,), async_level=0)
    harness.accepted(ALICE, useful=(True, False))  # half of the groups are useful, and the batch lacks three
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
