"""Late and missed tasks: whole pools in virtual time, and each rule alone."""

import random

import pytest

from shoal.coordinator import arrivals
from shoal.coordinator.pool import Pool

from . import simulation
from .simulation import Simulation, silent, workers
from .support import ALICE, BOB, CAROL, Harness, staffed_pool

DAVE, ERIN = "d" * 64, "1" * 64
USELESS = (False, False)  # fills no batch, so that any number can be accepted

# Measured: 6, 19 and 30 % over 12 steps and three seeds; 1, 4 and 16 % over 40 steps. With tasks that were counted on until
# a fixed deadline: 930, 1,700 and 2,850 %.
SLOWER_BY = {1: 0.2, 2: 0.35, 5: 0.5}


@pytest.mark.parametrize("held_by", SLOWER_BY)
def test_silent_keys_among_eight_hardly_slow_the_run(held_by: int) -> None:
    """Compared with a pool of the honest workers alone."""
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
    """A hundred pools of mixed speeds, crashing workers, lost uploads and a coordinator that restarts."""
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
    """kill -9 of the coordinator: only the database is left."""
    old = harness.pool
    harness.pool = Pool(old.db.connection, old.db.ledger, old.config, old.run, harness.clock, secret=b"secret")


# --- each rule alone -------------------------------------------------------------------------------------------------


def proven(harness: Harness, key: str, takes_s: float, times: int = 4) -> None:
    """Let a worker's submissions be accepted a few times."""
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
    """A batch of two tasks; Alice and Bob have accepted work and need 4 s per task."""
    harness = staffed_pool(
        workers=(ALICE, BOB, CAROL, DAVE, ERIN), validators=(), prompts_per_step=4, online_filter=True
    )
    for key in (ALICE, BOB):
        proven(harness, key, 4.0)
    harness.pool.db.connection.change(
        "UPDATE groups SET useful = TRUE, stale = TRUE"
    )  # the share of useful groups is 1
    return harness


def test_work_is_assigned_again_when_it_is_late_by_its_workers_own_time(pool: Harness) -> None:
    pool.task(ALICE)
    pool.task(BOB)
    assert "catch up" in pool.beat(CAROL, 0).waiting_for
    pool.clock.now_s += arrivals.LATE * 4.0 + 0.01
    beat_all(pool, ALICE, BOB)
    assert pool.task(CAROL)
    assert pool.task(ALICE).number == 4, "the late one keeps its task"


def test_a_slower_workers_task_counts_as_in_progress_for_longer_up_to_a_limit(pool: Harness) -> None:
    node = pool.pool.db.nodes
    node.timeout_s = 1.0  # a silent worker's task does not count
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
    assert "catch up" in pool.beat(DAVE, 0).waiting_for, "half of the batch is reserved"
    assert pool.task(ALICE)


def test_without_accepted_work_in_the_pool_newcomers_get_all_the_work() -> None:
    harness = staffed_pool(workers=(ALICE, BOB, CAROL), validators=())
    assert harness.task(ALICE) and harness.task(BOB)
    assert "catch up" in harness.beat(CAROL, 0).waiting_for
    harness.clock.now_s += arrivals.LATE * arrivals.START_S + 0.01
    assert harness.task(CAROL), "and their tasks are soon late"


def miss(harness: Harness, key: str) -> float:
    """Get a task, request another after its deadline, and rest. Return for how long."""
    harness.task(key)
    harness.clock.now_s += 601.0
    assert "were not uploaded" in harness.beat(key, 0).waiting_for
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
    assert pool.node(CAROL).suspensions == 1, "a new key is suspended after four"


def test_accepted_work_ends_the_rest_but_forgets_only_part_of_the_share(pool: Harness) -> None:
    miss(pool, ALICE)
    miss(pool, ALICE)
    before = pool.node()
    proven(pool, ALICE, 4.0, times=1)
    after = pool.node()
    assert (before.missed_in_a_row, after.missed_in_a_row, after.rests_until_s) == (2, 0, 0)
    assert after.missed == pytest.approx(before.missed * (1 - arrivals.SHARE_WEIGHT))


def test_reporting_one_version_after_the_other_yields_one_task_and_then_a_rest(pool: Harness) -> None:
    """Not three tasks at once to choose from."""
    pool.publish(1, 2)
    tasks = {assignment.id for version in (0, 1, 2, 0, 1) if (assignment := pool.beat(ALICE, version).assignment)}
    assert len(tasks) == 1
    assert "1 in a row were not uploaded" in pool.beat(ALICE, 2).waiting_for
    pool.clock.now_s += 600
    later = {assignment.id for version in (2, 1, 0) if (assignment := pool.beat(ALICE, version).assignment)}
    assert len(later) == 1 and later != tasks
