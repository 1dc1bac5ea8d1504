import pytest

from shoal.coordinator.database import PoolError

from .support import ALICE, BOB, OTHER_VALIDATOR, VALIDATOR, Desk, open_pool, payload


def test_an_invite_makes_a_member_of_its_role_and_name() -> None:
    desk = open_pool()
    answer = desk.pool.members.register(ALICE, payload("alice"), None)
    assert (answer.name, answer.role, desk.pool.members.role(ALICE)) == ("alice", "worker", "worker")
    assert desk.kinds() == ["registered"]


def test_the_same_key_may_come_again_with_a_new_address_even_after_expiry() -> None:
    desk = open_pool()
    invite = payload("relay", role="relay")
    desk.pool.members.register(ALICE, invite, "http://a:1")
    desk.clock.now_s = 9_999
    desk.pool.members.register(ALICE, invite, "http://a:2")
    assert desk.beat(ALICE, wants=False).relays == ["http://a:2"]
    assert desk.kinds() == ["registered"], "a restart is not registered twice"


def test_an_invite_is_spent_by_the_first_key() -> None:
    desk = open_pool()
    desk.pool.members.register(ALICE, payload("alice"), None)
    with pytest.raises(PoolError, match="used by another key") as caught:
        desk.pool.members.register(BOB, payload("alice"), None)
    assert caught.value.status == 403
    assert desk.pool.members.role(BOB) is None


def test_a_name_is_taken_whatever_the_invite() -> None:
    desk = open_pool()
    desk.pool.members.register(ALICE, payload("alice"), None)
    with pytest.raises(PoolError, match="another key"):
        desk.pool.members.register(BOB, payload("alice", nonce="1" * 32), None)


def test_one_key_has_one_role() -> None:
    desk = open_pool()
    desk.pool.members.register(ALICE, payload("alice"), None)
    with pytest.raises(PoolError, match="already registered as alice"):
        desk.pool.members.register(ALICE, payload("boss", role="learner", nonce="1" * 32), None)
    assert desk.pool.members.role(ALICE) == "worker"


def test_an_expired_invite_is_refused() -> None:
    desk = open_pool()
    desk.clock.now_s = 2_000.5
    with pytest.raises(PoolError, match="expired"):
        desk.pool.members.register(ALICE, payload("alice"), None)


def test_the_descriptor_names_keys_of_every_role_but_workers(desk: Desk) -> None:
    assert desk.pool.members.keys() == {"validator": [VALIDATOR, OTHER_VALIDATOR]}
