import pytest

from shoal.coordinator.database import PoolError

from .support import ALICE, BOB, OTHER_VALIDATOR, VALIDATOR, Harness, open_pool, payload

pytestmark = pytest.mark.usefixtures("every_database_slow")


def test_an_invite_makes_a_member_of_its_role_and_name() -> None:
    harness = open_pool()
    answer = harness.pool.members.register(ALICE, payload("alice"), None)
    assert (answer.name, answer.role, harness.pool.members.role(ALICE)) == ("alice", "worker", "worker")
    assert harness.kinds() == ["registered"]


def test_the_same_key_may_come_again_with_a_new_address_even_after_expiry() -> None:
    harness = open_pool()
    invite = payload("relay", role="relay")
    harness.pool.members.register(ALICE, invite, "http://a:1")
    harness.clock.now_s = 9_999
    harness.pool.members.register(ALICE, invite, "http://a:2")
    assert harness.beat(ALICE, wants=False).relays == ["http://a:2"]
    assert harness.kinds() == ["registered"], "a restart is not registered twice"


def test_an_invite_and_a_name_are_spent_by_the_first_key() -> None:
    harness = open_pool()
    harness.pool.members.register(ALICE, payload("alice"), None)
    for invite in (payload("alice"), payload("alice", nonce="1" * 32)):  # a name is taken whatever the invite
        with pytest.raises(PoolError, match="used by another key") as caught:
            harness.pool.members.register(BOB, invite, None)
        assert caught.value.status == 403 and harness.pool.members.role(BOB) is None
    with pytest.raises(PoolError, match="already registered as alice"):
        harness.pool.members.register(ALICE, payload("boss", role="learner", nonce="1" * 32), None)
    assert harness.pool.members.role(ALICE) == "worker", "one key has one role"


def test_an_expired_invite_is_refused() -> None:
    harness = open_pool()
    harness.clock.now_s = 2_000.5
    with pytest.raises(PoolError, match="expired"):
        harness.pool.members.register(ALICE, payload("alice"), None)


def test_keys_and_addresses_of_evicted_nodes_are_not_announced(harness: Harness) -> None:
    for number, url in enumerate(("http://a:1", "http://b:1")):
        key, invite = f"{number}" * 64, payload(f"relay-{number}", role="relay", nonce=f"{number}" * 32)
        harness.pool.members.register(key, invite, url)
    harness.pool.db.nodes.move("0" * 64, "ban", "", 0.0)
    harness.pool.db.nodes.move(VALIDATOR, "ban", "", 0.0)
    assert harness.pool.members.keys() == {"validator": [OTHER_VALIDATOR], "relay": ["1" * 64]}
    assert harness.beat(wants=False).relays == ["http://b:1"]


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
    ],
)
def test_a_relay_cannot_send_every_node_into_its_own_network(url: str) -> None:
    harness = open_pool(listen="0.0.0.0:0")
    with pytest.raises(PoolError, match="cannot announce") as caught:
        harness.pool.members.register("d" * 64, payload("relay-0", role="relay"), url)
    assert caught.value.status == 400 and harness.pool.members.role("d" * 64) is None
    harness.pool.members.register("d" * 64, payload("relay-0", role="relay"), "https://relay.example.org:8710")
    with pytest.raises(PoolError, match="cannot announce"):
        harness.pool.members.register("d" * 64, payload("relay-0", role="relay"), url)
    harness.publish(0)
    assert harness.pool.db.nodes.relay_urls() == ["https://relay.example.org:8710"]


def test_in_a_pool_on_one_machine_relays_are_there_too() -> None:
    harness = open_pool()
    harness.pool.members.register("d" * 64, payload("relay-0", role="relay"), "http://127.0.0.1:8710")
    with pytest.raises(PoolError, match="no server of a pool can be"):
        harness.pool.members.register("e" * 64, payload("relay-1", role="relay"), "http://169.254.169.254:80")
