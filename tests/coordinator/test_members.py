from typing import Any

import pytest

from shoal.coordinator.checkers import Fingerprints
from shoal.coordinator.credit import BookedStakes, ChainStakes
from shoal.coordinator.database import PoolError
from shoal.coordinator.nodes import FORGET_S, MAX_SUSPENSION_S
from shoal.coordinator.pool import Pool
from shoal.ledger.stakes import UNSTAKE_S
from shoal.protocol.messages import Booking, Capability, Heartbeat, InvitePayload, Reason

from .support import (
    ALICE,
    BOB,
    CAROL,
    FILE,
    OTHER_VALIDATOR,
    VALIDATOR,
    Harness,
    metrics_of,
    open_pool,
    payload,
    staffed_pool,
    strangers,
)

pytestmark = pytest.mark.usefixtures("every_database_slow")


def test_the_same_key_may_register_again_at_a_new_address_even_after_its_invite_expired() -> None:
    harness = open_pool()
    invite = payload("relay", role="relay")
    answer = harness.pool.members.register(ALICE, invite, "http://a:1")
    assert (answer.name, answer.role, harness.pool.members.role(ALICE)) == ("relay", "relay", "relay")
    harness.clock.now_s = 9_999
    harness.pool.members.register(ALICE, invite, "http://a:2")
    assert harness.beat(ALICE, wants=False).relays == ["http://a:2"]
    assert harness.kinds() == ["registered"], "a restart must not be registered again"
    with pytest.raises(PoolError, match="expired"):
        harness.pool.members.register(BOB, payload("bob", nonce="1" * 32), None)


def test_an_invite_and_a_name_belong_to_the_first_key() -> None:
    harness = open_pool()
    harness.pool.members.register(ALICE, payload("alice"), None)
    other = payload("alice", nonce="1" * 32)  # a name stays taken, whichever invite is used
    for invite, why in ((payload("alice"), "the invite for alice was used"), (other, "the name alice is taken; ask")):
        with pytest.raises(PoolError, match=why) as caught:
            harness.pool.members.register(BOB, invite, None)
        assert caught.value.status == 403 and harness.pool.members.role(BOB) is None
    with pytest.raises(PoolError, match="already registered as alice"):
        harness.pool.members.register(ALICE, payload("boss", role="learner", nonce="1" * 32), None)
    assert harness.pool.members.role(ALICE) == "worker", "a key must keep its role"


def test_a_report_takes_as_many_queries_for_many_nodes_as_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = open_pool()
    connection = harness.pool.db.connection
    queries: list[str] = []
    for name in ("rows", "row"):
        query = getattr(connection, name)
        monkeypatch.setattr(
            connection, name, lambda sql, *rest, query=query: (queries.append(sql), query(sql, *rest))[1]
        )
    counts = []
    for number in range(3):
        harness.pool.members.register(f"{number}" * 64, payload(f"w-{number}", nonce=f"{number}" * 32), None)
        for version in (2, 10):
            Fingerprints(connection).put(f"{number}" * 64, version, f"{version:02}{number}" + "a" * 61)
        queries.clear()
        nodes, _ = harness.status().nodes, harness.metrics()
        counts.append(len(queries))
    assert counts == [counts[0]] * 3
    assert {node.name: node.fingerprint[:3] for node in nodes} == {"w-0": "100", "w-1": "101", "w-2": "102"}


def test_keys_and_addresses_of_evicted_nodes_are_not_announced(harness: Harness) -> None:
    for number, url in enumerate(("http://a:1", "http://b:1")):
        key, invite = f"{number}" * 64, payload(f"relay-{number}", role="relay", nonce=f"{number}" * 32)
        harness.pool.members.register(key, invite, url)
    harness.pool.db.nodes.move("0" * 64, "ban", "", 0.0)
    harness.pool.db.nodes.move(VALIDATOR, "ban", "", 0.0)
    assert harness.pool.members.keys() == {"validator": [OTHER_VALIDATOR], "relay": ["1" * 64]}
    assert harness.beat(wants=False).relays == ["http://b:1"]


def test_an_evicted_relay_is_not_shown_as_slashed(harness: Harness) -> None:
    harness.join("0" * 64, "relay")
    harness.pool.db.nodes.move("0" * 64, "ban", "evicted by the operator", 0.0)
    harness.rejected(Reason.PROOF)
    status = harness.status()
    assert status.slashed == ["worker-a"]
    assert [node.name for node in status.nodes if node.evicted] == ["relay-0", "worker-a"]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:22",
        "http://localhost:8500",
        "http://169.254.169.254/latest",
        "http://169.254.169.254:80",
        "http://10.0.0.7:80",
        "http://[::1]:80",
        "http://user:password@relay.example.org:80",
        "http://relay.example.org:80/../admin?x=1",
        "http://relay.example.org:80#x",
        "https://:80",
        "http://a\\b:80",
        "http://a..b:80",
        f"http://{'a' * 64}:80",
        "http://１２７.0.0.1:80",
        "http://127。0。0。1:80",
    ],
)
def test_a_relay_cannot_announce_a_private_or_malformed_address(url: str) -> None:
    harness = open_pool(listen="0.0.0.0:0")
    with pytest.raises(PoolError, match="cannot announce") as caught:
        harness.pool.members.register("d" * 64, payload("relay-0", role="relay"), url)
    assert caught.value.status == 400 and harness.pool.members.role("d" * 64) is None
    harness.pool.members.register("d" * 64, payload("relay-0", role="relay"), "https://relay.example.org:8710")
    with pytest.raises(PoolError, match="cannot announce"):
        harness.pool.members.register("d" * 64, payload("relay-0", role="relay"), url)
    harness.publish(0)
    assert harness.pool.db.nodes.relay_urls() == ["https://relay.example.org:8710"]


@pytest.mark.parametrize("url", ["http://a:80", "HTTP://A", "http://b:1/", "http://c:1"])
def test_a_relay_cannot_announce_the_address_of_another_server(url: str) -> None:
    harness = open_pool()
    members, origin, relay = harness.pool.members, payload("origin", role="origin"), payload("relay-0", role="relay")
    members.coordinator_url = "http://c:1"
    members.register("a" * 64, origin, "http://a:80")
    members.register("b" * 64, relay.model_copy(update={"nonce": "1" * 32}), "http://b:1")
    mine = payload("relay-1", role="relay", nonce="2" * 32)
    members.register("d" * 64, mine, "http://d:1")
    with pytest.raises(
        PoolError, match="it is the address of (origin|relay-0|the coordinator); announce this server's"
    ):
        members.register("d" * 64, mine, url)
    assert harness.beat("d" * 64, wants=False).relays == ["http://b:1", "http://d:1"]


@pytest.mark.parametrize(
    ("taken", "url"),
    [
        ("http://a.example", "http://A.example.:80"),
        ("http://a.example.:443", "https://a.example"),
        *[("http://127.0.0.1:1", f"http://{host}:1") for host in ("127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1")],
        *[
            ("http://127.0.0.1:1", f"http://{host}:1")
            for host in ("127.0.0.1.", "[::ffff:7f00:1]", "[::FFFF:127.0.0.1]")
        ],
        ("http://localhost:1", "http://127.0.0.1:1"),
        ("http://[2001:db8::1]:1", "http://[2001:0DB8:0::1]:1"),
    ],
)
def test_a_relay_cannot_announce_another_spelling_of_a_servers_address(taken: str, url: str) -> None:
    harness = open_pool()
    harness.pool.members.register("a" * 64, payload("origin", role="origin"), taken)
    with pytest.raises(PoolError, match="it is the address of origin"):
        harness.pool.members.register("d" * 64, payload("relay-0", role="relay", nonce="1" * 32), url)


def test_a_relay_cannot_keep_the_origin_out_by_taking_its_address() -> None:
    harness = open_pool()
    harness.pool.members.register("d" * 64, payload("relay-0", role="relay"), "http://a:1")
    harness.pool.members.register("a" * 64, payload("origin", role="origin", nonce="1" * 32), "http://a:1")
    harness.clock.now_s += harness.pool.db.nodes.timeout_s + 1  # the origin is gone, but keeps its address
    with pytest.raises(PoolError, match="it is the address of origin"):
        harness.pool.members.register("d" * 64, payload("relay-0", role="relay"), "http://a:1")


def test_a_relay_may_keep_its_address_or_take_that_of_a_relay_that_is_gone_or_evicted() -> None:
    harness = open_pool()
    old, new = payload("relay-0", role="relay"), payload("relay-1", role="relay", nonce="1" * 32)
    for _ in range(2):  # the second time is a restart
        harness.pool.members.register("a" * 64, old, "http://a:1")
    harness.clock.now_s += harness.pool.db.nodes.timeout_s + 1
    harness.pool.members.register("b" * 64, new, "http://a:1")
    harness.pool.db.nodes.move("b" * 64, "ban", "", 0.0)
    harness.pool.members.register("a" * 64, old, "http://a:1")
    assert harness.beat("a" * 64, wants=False).relays == ["http://a:1"]


def test_in_a_pool_on_one_machine_relays_may_have_loopback_addresses() -> None:
    harness = open_pool()
    harness.pool.members.register("d" * 64, payload("relay-0", role="relay"), "http://127.0.0.1:8710")
    with pytest.raises(PoolError, match="no other machine can connect"):
        harness.pool.members.register("e" * 64, payload("relay-1", role="relay"), "http://169.254.169.254:80")


# --- places ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_place() -> Harness:
    """Return a run with one place, which Alice has."""
    return staffed_pool(workers=(ALICE,), validators=(VALIDATOR,), requirements={"places": 1})


def is_full(one_place: Harness, key: str = BOB) -> bool:
    try:
        one_place.join(key)
    except PoolError as error:
        assert error.status == 403 and "this run is full: it has places for 1 workers" in str(error)
        return True
    return False


def leaves(one_place: Harness, key: str) -> None:
    one_place.pool.members.drain(key)
    assert one_place.beat(key, wants=False).state == "left"


def test_a_full_run_admits_no_new_worker(one_place: Harness) -> None:
    assert is_full(one_place) and one_place.pool.members.role(BOB) is None
    assert not is_full(one_place, ALICE), "a restarted worker must keep its place"
    one_place.join("d" * 64, "relay")


def test_a_worker_that_leaves_frees_its_place_and_needs_a_free_one_to_return(one_place: Harness) -> None:
    leaves(one_place, ALICE)
    assert not is_full(one_place, BOB) and is_full(one_place, ALICE)
    leaves(one_place, BOB)
    assert not is_full(one_place, ALICE)


@pytest.mark.parametrize("event", [None, "dismiss", "ban"])
def test_a_silent_dismissed_or_banned_worker_frees_its_place(one_place: Harness, event: Any) -> None:
    one_place.clock.now_s += 29
    assert is_full(one_place)
    if event:
        one_place.pool.db.nodes.move(ALICE, event, "", one_place.clock.now_s)
    else:
        one_place.clock.now_s += 2
    assert not is_full(one_place)


# --- requirements ----------------------------------------------------------------------------------------------------


def test_a_machine_that_lacks_a_requirement_is_refused_and_told_which() -> None:
    harness = open_pool(requirements={"engines": ["vllm"]})
    register = harness.pool.members.register
    with pytest.raises(PoolError, match=r"requires one of these engines: vllm \(this machine has torch\)") as caught:
        register(ALICE, payload("alice"), None, Capability(device="cpu", engine="torch"))
    assert caught.value.status == 403 and harness.pool.members.role(ALICE) is None
    with pytest.raises(PoolError, match="requires"):
        register(ALICE, payload("alice"), None)
    register(VALIDATOR, payload("v", role="validator"), None)
    register(ALICE, payload("alice", nonce="1" * 32), None, fit := Capability(device="cpu", engine="vllm"))
    assert fit in [node.capability for node in harness.status().nodes], "the status must show a machine's report"


# --- open mode -------------------------------------------------------------------------------------------------------


def test_nobody_takes_a_strangers_name_with_a_key_that_begins_like_its_key() -> None:
    """A search can find a key that starts with 32 given bits, and a stake reveals a stranger's key in advance."""
    harness, honest = open_pool(requirements={"stake": 100}), "7" * 64
    liar = honest[:8] + "0" * 56
    for key in (liar, honest):
        harness.pool.members.stakes.accounts.deposit(key, 100)  # type: ignore[attr-defined]
    taken = harness.pool.members.register(liar, strangers(), None).name
    assert harness.pool.members.register(honest, strangers(), None).name != taken


def test_an_open_invite_needs_some_stake_and_admits_workers_only() -> None:
    with pytest.raises(PoolError, match="an open invite needs 1:"):
        open_pool().pool.members.register(ALICE, strangers(), None)
    with pytest.raises(ValueError, match="an open invite is for workers"):
        InvitePayload(run="r", role="validator", name="v", nonce="0" * 32, expires_s=1, open=True)


# --- suspension ------------------------------------------------------------------------------------------------------


def test_a_suspended_worker_gets_no_new_task_until_its_time_is_over(harness: Harness) -> None:
    held = harness.task(ALICE)
    until_s = harness.pool.db.nodes.suspend(ALICE, "3 tasks expired", harness.clock.now_s)
    harness.pool.assignments.uploaded(ALICE, held.id, "9" * 64)
    assert harness.claimed().assignment == held
    assert until_s == harness.clock.now_s + 60
    answer = harness.beat(ALICE)
    assert (answer.state, answer.assignment) == ("running", None)
    assert answer.waiting_for == "its suspension to end in 60 s (3 tasks expired)"
    assert harness.task(BOB)
    harness.clock.now_s = until_s - 0.5
    assert harness.beat(ALICE).assignment is None
    harness.clock.now_s = until_s
    assert harness.task(ALICE).number == 1
    assert harness.kinds().count("slashed") == 0


def test_each_suspension_is_twice_as_long_as_the_one_before_up_to_a_limit(harness: Harness) -> None:
    lengths = []
    for _ in range(12):
        until_s = harness.pool.db.nodes.suspend(ALICE, "why", harness.clock.now_s)
        lengths.append(until_s - harness.clock.now_s)
        harness.clock.now_s = until_s
    assert lengths[:4] == [60, 120, 240, 480]
    assert lengths[-1] == MAX_SUSPENSION_S and lengths == sorted(lengths)


def test_an_old_suspension_is_forgotten(harness: Harness) -> None:
    until_s = harness.pool.db.nodes.suspend(ALICE, "why", harness.clock.now_s)
    harness.clock.now_s = until_s + FORGET_S
    assert harness.pool.db.nodes.suspend(ALICE, "why", harness.clock.now_s) == harness.clock.now_s + 120
    harness.clock.now_s += 121 + FORGET_S
    assert harness.pool.db.nodes.suspend(ALICE, "why", harness.clock.now_s) == harness.clock.now_s + 60


def test_status_and_metrics_show_a_suspension_while_it_lasts(harness: Harness) -> None:
    harness.pool.db.nodes.suspend(ALICE, "3 tasks expired", harness.clock.now_s)
    harness.clock.now_s += 20

    def shown() -> dict[str, tuple[float, str]]:
        return {node.name: (node.suspended_s, node.suspension) for node in harness.status().nodes}

    assert shown()["worker-a"] == (pytest.approx(40), "3 tasks expired") and shown()["worker-b"] == (0, "")
    assert metrics_of(harness.metrics())["shoal_suspended_nodes"] == 1
    harness.clock.now_s += 40
    assert shown()["worker-a"] == (0, "")
    assert metrics_of(harness.metrics())["shoal_suspended_nodes"] == 0


@pytest.mark.parametrize("reason", [Reason.UNREADABLE, Reason.BOUNDS, Reason.SIGNATURE, Reason.CONTEXT])
def test_a_worker_that_sends_unusable_files_gets_fewer_and_fewer_tasks(harness: Harness, reason: Reason) -> None:
    """A file of one byte costs its sender nothing, but costs a validator time."""
    sent, started_s = 0, harness.clock.now_s
    while harness.clock.now_s < started_s + 24 * 3600:
        if harness.beat(ALICE).assignment is None:
            harness.clock.now_s += 60
            harness.beat(BOB, wants=False)
            continue
        harness.rejected(reason)
        sent += 1
    assert 2 < sent < 20
    assert "slashed" not in harness.kinds() and harness.pool.members.role(ALICE) == "worker"
    assert f"of its newest 20 files were unusable, the last one: {reason.value}" in harness.beat(ALICE).waiting_for


@pytest.mark.parametrize(("reason", "between"), [(Reason.UNREADABLE, 20), (Reason.UNREPEATABLE, 0)])
def test_rare_unreadable_files_and_unrepeatable_programs_suspend_nobody(
    harness: Harness, reason: Reason, between: int
) -> None:
    for _ in range(3):
        harness.rejected(reason)
        for _ in range(between):
            harness.accepted(useful=(False, False))
    assert harness.beat(ALICE).assignment is not None


# --- stake -----------------------------------------------------------------------------------------------------------


REQUIRED = 100


@pytest.fixture
def staking(every_database_slow: str) -> Harness:
    return staffed_pool(workers=(), validators=(VALIDATOR,), requirements={"stake": REQUIRED})


def booked(pool: Pool) -> BookedStakes:
    assert isinstance(pool.members.stakes, BookedStakes)
    return pool.members.stakes


def book(staking: Harness, kind: str, amount: int = 0) -> None:
    booked(staking.pool).book(Booking(kind=kind, key=ALICE, amount=amount))  # type: ignore[arg-type]


def test_a_deposit_admits_a_stranger_and_becomes_its_stake(staking: Harness) -> None:
    book(staking, "stake", 60)
    with pytest.raises(PoolError, match="has staked 60, but an open invite needs 100") as caught:
        staking.pool.members.register(ALICE, strangers(), None)
    assert caught.value.status == 403 and staking.pool.members.role(ALICE) is None
    book(staking, "stake", 40)
    for _ in range(2):  # the second time is a restart
        answer = staking.pool.members.register(ALICE, strangers(), None)
        assert answer.name == f"stranger-{ALICE[:16]}" and booked(staking.pool).at_risk(ALICE) == 100
    assert staking.beat().assignment is not None
    staking.join(BOB)
    assert staking.beat(BOB).assignment is not None, "an invited worker must get tasks without stake"


def test_a_worker_that_takes_its_stake_back_gets_no_more_tasks(staking: Harness) -> None:
    book(staking, "stake", 100)
    staking.pool.members.register(ALICE, strangers(), None)
    book(staking, "unstake", 1)
    answer = staking.beat()
    assert answer.assignment is None and "more stake: this key has 99 at risk" in answer.waiting_for
    with pytest.raises(PoolError, match="can withdraw from"):
        book(staking, "withdraw")
    staking.clock.now_s += UNSTAKE_S
    book(staking, "withdraw")
    book(staking, "stake", 1)
    assert staking.beat().assignment is not None


def test_a_stranger_that_unstakes_holds_no_place() -> None:
    full = open_pool(requirements={"stake": REQUIRED, "places": 1})
    book(full, "stake", REQUIRED)
    full.pool.members.register(ALICE, strangers(), None)
    assert is_full(full) and full.pool.members.count_workers() == 1
    book(full, "unstake", 1)
    assert not is_full(full) and is_full(full, CAROL)


def test_a_stranger_whose_deposit_is_not_at_risk_yet_holds_no_place() -> None:
    full, stakes = open_pool(requirements={"stake": REQUIRED, "places": 1}), ChainStakes()
    full.pool.members.stakes = stakes
    stakes.offers = {ALICE: REQUIRED}
    full.pool.members.register(ALICE, strangers(), None)
    assert not is_full(full) and is_full(full, CAROL)


def test_a_slash_gives_the_stake_to_the_pool(staking: Harness) -> None:
    book(staking, "stake", 100)
    staking.pool.members.register(ALICE, strangers(), None)
    task = staking.task()
    staking.pool.assignments.uploaded(ALICE, task.id, FILE)
    for validator in (VALIDATOR, OTHER_VALIDATOR):
        staking.join(validator, "validator")
    staking.claim()
    staking.judge(task.id, Reason.PROOF)
    stakes = booked(staking.pool)
    assert (stakes.accounts.book().pool, stakes.at_risk(ALICE)) == (100, 0)


def test_a_forbidden_booking_is_refused_and_changes_nothing(staking: Harness) -> None:
    before = staking.pool.db.ledger.head()
    for kind in ("unstake", "withdraw"):
        with pytest.raises(PoolError):
            book(staking, kind, 5)
    assert staking.pool.db.ledger.head() == before


def test_with_a_contract_only_stake_at_risk_earns_tasks(staking: Harness) -> None:
    stakes = ChainStakes()
    staking.pool.members.stakes = stakes
    stakes.offers = {ALICE: REQUIRED}
    staking.pool.members.register(ALICE, strangers(), None, payer="0x" + "1" * 40)
    assert staking.beat().assignment is None, "a deposit that can still be taken back must earn no task"
    stakes.members = {ALICE: REQUIRED}
    assert staking.beat().assignment is not None
    [entry] = [entry for entry in staking.pool.db.ledger.entries(kind="registered") if ALICE in entry.body]
    assert '"payer":"0x1111111111111111111111111111111111111111"' in entry.body


@pytest.mark.parametrize("role", ["worker", "validator", "evaluator", "learner"])
def test_a_role_that_opens_no_port_announces_no_url(harness: Harness, role: Any) -> None:
    key = "7" * 64
    with pytest.raises(PoolError, match="opens no port") as caught:
        harness.pool.members.register(key, payload("new", role=role, nonce="7" * 32), "http://a:1")
    assert caught.value.status == 400 and harness.pool.members.role(key) is None


def test_the_learner_hears_which_nodes_refuse_a_version_and_others_do_not(harness: Harness) -> None:
    members, worker, learner = harness.pool.members, "7" * 64, "8" * 64
    members.register(worker, payload("new", nonce="7" * 32), None)
    members.register(learner, payload("boss", role="learner", nonce="8" * 32), None)
    assert members.heartbeat(worker, Heartbeat(refused="version 3: tk.py")).refused == []
    assert members.heartbeat(learner, Heartbeat()).refused == ["new refuses version 3: tk.py"]
    members.heartbeat(worker, Heartbeat())
    assert members.heartbeat(learner, Heartbeat()).refused == []
