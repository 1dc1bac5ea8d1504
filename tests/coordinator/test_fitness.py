"""Who may join: a worker with the engine that the run requires, and a stranger with the stake that it requires."""

import pytest

from shoal.coordinator.database import PoolError
from shoal.protocol.messages import Capability, InvitePayload

from .support import ALICE, BOB, VALIDATOR, open_pool, payload

LAPTOP = Capability(device="cpu", engine="torch")


def test_a_machine_that_lacks_something_is_told_what() -> None:
    harness = open_pool(requirements={"engines": ["vllm"]})
    with pytest.raises(PoolError, match=r"this run requires an engine of vllm \(it has torch\)") as caught:
        harness.pool.members.register(ALICE, payload("alice"), None, LAPTOP)
    assert caught.value.status == 403 and harness.pool.members.role(ALICE) is None
    with pytest.raises(PoolError, match="requires"):
        harness.pool.members.register(ALICE, payload("alice"), None)
    harness.pool.members.register(VALIDATOR, payload("v", role="validator"), None)


def test_a_machine_that_has_it_joins_and_its_report_is_shown() -> None:
    harness = open_pool(requirements={"engines": ["torch"]})
    harness.pool.members.register(ALICE, payload("alice"), None, LAPTOP)
    assert harness.status().nodes[0].capability == LAPTOP


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
