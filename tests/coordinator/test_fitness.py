"""What a run requires of workers: refused by their own report, or found too slow by their own accepted work."""

import pytest

from shoal.coordinator.arrivals import MEASURED, RETRY_S
from shoal.coordinator.database import PoolError
from shoal.coordinator.members import GIB
from shoal.protocol.messages import Capability, Heartbeat, InvitePayload

from .support import ALICE, BOB, VALIDATOR, Harness, open_pool, payload, staffed_pool

LAPTOP = Capability(memory_bytes=8 * GIB, cores=4, device="cpu", engine="torch")
USELESS = (False, False)  # 20 tokens, in no batch


@pytest.mark.parametrize(
    "requirements, missing",
    [
        ({"memory_gib": 16}, r"16 GiB of memory \(it has 8.0\)"),
        ({"devices": ["cuda"]}, r"a device of cuda \(it has cpu\)"),
        ({"engines": ["vllm"]}, r"an engine of vllm \(it has torch\)"),
    ],
)
def test_a_machine_that_lacks_something_is_told_what(requirements: dict[str, object], missing: str) -> None:
    harness = open_pool(requirements=requirements)
    with pytest.raises(PoolError, match=f"this run requires {missing}") as caught:
        harness.pool.members.register(ALICE, payload("alice"), None, LAPTOP)
    assert caught.value.status == 403 and harness.pool.members.role(ALICE) is None
    with pytest.raises(PoolError, match="requires"):
        harness.pool.members.register(ALICE, payload("alice"), None)
    harness.pool.members.register(VALIDATOR, payload("v", role="validator"), None)


def test_a_machine_that_has_it_joins_and_its_report_is_shown() -> None:
    harness = open_pool(requirements={"memory_gib": 8, "devices": ["cpu"], "engines": ["torch"]})
    harness.pool.members.register(ALICE, payload("alice"), None, LAPTOP)
    assert harness.status().nodes[0].capability == LAPTOP


def work(harness: Harness, key: str, takes_s: float, times: int) -> None:
    for _ in range(times):
        task = harness.task(key)
        harness.clock.now_s += takes_s
        harness.pool.assignments.uploaded(key, task.id, "9" * 64)
        harness.clock.now_s += 20.0  # a validator's time is not the worker's
        harness.beat(key, 0, wants=False)
        harness.claim()
        harness.judge(task.id, None, USELESS)


@pytest.fixture
def pool() -> Harness:
    """20 tokens a task, and 5 a second required."""
    return staffed_pool(
        validators=(VALIDATOR,), requirements={"tokens_per_s": 5}, prompts_per_step=64, node_timeout_s=1e9
    )


def test_speed_is_measured_by_accepted_work_and_the_coordinators_clock(pool: Harness) -> None:
    work(pool, ALICE, 2.0, MEASURED + 2)
    shown = {node.name: node for node in pool.status().nodes}["worker-a"]
    assert shown.tokens_per_s == pytest.approx(10.0) and shown.state == "active"


def test_who_is_too_slow_gets_no_tasks_is_paid_and_measured_anew_later(pool: Harness) -> None:
    work(pool, ALICE, 8.0, MEASURED)
    answer = pool.beat(ALICE)
    assert answer.assignment is None and "2.5 tokens/s in its newest tasks" in answer.waiting_for
    shown = {node.name: node for node in pool.status().nodes}["worker-a"]
    assert (shown.state, shown.accepted, shown.pending) == ("unfit", MEASURED, 20 * MEASURED)
    pool.clock.now_s += RETRY_S
    work(pool, ALICE, 2.0, MEASURED + 1)
    assert pool.task(ALICE), "it became faster"
    assert "slashed" not in pool.kinds() and pool.task(BOB)


def test_what_is_measured_anew_leaves_out_tasks_of_before(pool: Harness) -> None:
    """They were in flight when the worker became unfit, and are accepted afterwards."""
    tasks = []
    for _ in range(MEASURED + 2):
        tasks.append(pool.task(ALICE))
        pool.clock.now_s += 8.0
        pool.pool.assignments.uploaded(ALICE, tasks[-1].id, "9" * 64)
    for task in tasks:
        assert pool.claim() is not None
        pool.judge(task.id, None, USELESS)
    node = pool.pool.db.nodes.get(ALICE)
    assert node is not None and (node.state, node.speeds) == ("unfit", 0)


def test_being_fast_for_a_test_does_not_help(pool: Harness) -> None:
    """Every task is a challenge: there is no other kind of task to be slow in."""
    work(pool, ALICE, 1.0, MEASURED)
    work(pool, ALICE, 9.0, 6)
    with pytest.raises(AssertionError, match="tokens/s in its newest tasks"):
        work(pool, ALICE, 9.0, 4)


# --- open mode -------------------------------------------------------------------------------------------------------


def strangers() -> InvitePayload:
    return payload("stranger").model_copy(update={"open": True})


def test_an_open_invite_lets_in_every_key_with_stake_under_its_own_name() -> None:
    harness = open_pool(requirements={"stake": 100})
    for key, staked in ((ALICE, 100), (BOB, 250), ("c" * 64, 99)):
        harness.pool.members.stakes.accounts.deposit(key, staked)  # type: ignore[attr-defined]
    names = [harness.pool.members.register(key, strangers(), None).name for key in (ALICE, BOB)]
    assert names == [f"stranger-{ALICE[:16]}", f"stranger-{BOB[:16]}"]
    assert harness.pool.members.register(ALICE, strangers(), None).name == names[0], "a restart"
    for poor in ("c" * 64, "d" * 64):
        with pytest.raises(PoolError, match="an open invite needs 100") as caught:
            harness.pool.members.register(poor, strangers(), None)
        assert caught.value.status == 403 and harness.pool.members.role(poor) is None


def test_nobody_takes_a_strangers_name_by_a_key_that_begins_like_its_key() -> None:
    """32 bits of a key are found by trying; a stranger's key is known from its stake before it joins."""
    harness, honest = open_pool(requirements={"stake": 100}), "7" * 64
    liar = honest[:8] + "0" * 56
    for key in (liar, honest):
        harness.pool.members.stakes.accounts.deposit(key, 100)  # type: ignore[attr-defined]
    taken = harness.pool.members.register(liar, strangers(), None).name
    assert harness.pool.members.register(honest, strangers(), None).name != taken


def test_no_stranger_joins_without_any_stake_even_where_the_run_requires_none() -> None:
    with pytest.raises(PoolError, match="an open invite needs 1:"):
        open_pool().pool.members.register(ALICE, strangers(), None)


def test_an_open_invite_makes_workers_only() -> None:
    with pytest.raises(ValueError, match="an open invite is for workers"):
        InvitePayload(run="r", role="validator", name="v", nonce="0" * 32, expires_s=1, open=True)


def flood(harness: Harness, rounds: int, pauses_s: tuple[float, ...]) -> None:
    """Rounds of as many tasks as there are pauses, all held at once; one is uploaded after each pause."""
    for _ in range(rounds):
        held: list[str] = []
        for _ in pauses_s:
            asks = Heartbeat(policy_version=0, wants_task=True, working_on=held)
            assigned = harness.pool.members.heartbeat(ALICE, asks).assignment
            assert assigned is not None
            held = [*held, assigned.id]
        for id, pause_s in zip(held, pauses_s, strict=True):
            harness.clock.now_s += pause_s
            harness.pool.assignments.uploaded(ALICE, id, "9" * 64)
            harness.claim()
            harness.judge(id, None, USELESS)


def speed_of(harness: Harness) -> float:
    node = harness.pool.db.nodes.get(ALICE)
    assert node is not None
    return node.tokens_per_s


@pytest.fixture
def three() -> Harness:
    """Three submissions in flight, 20 tokens a task; the first one is accepted after 4 s."""
    harness = staffed_pool(
        workers=(ALICE,), validators=(VALIDATOR,), in_flight=3, prompts_per_step=64, node_timeout_s=1e9
    )
    work(harness, ALICE, 4.0, 1)
    return harness


def test_several_at_once_are_not_taken_for_slowness(three: Harness) -> None:
    flood(three, 8, (4.0, 4.0, 4.0))
    assert speed_of(three) == pytest.approx(5.0)


def test_files_sent_together_make_nobody_fast(three: Harness) -> None:
    flood(three, 8, (12.0, 0.0, 0.0))
    assert 5.0 < speed_of(three) < 7.0
