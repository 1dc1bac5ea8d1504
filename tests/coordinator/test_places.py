"""`requirements.places`: how many workers a run has at once, and whose place is free again."""

import pytest

from shoal.coordinator.database import PoolError
from shoal.coordinator.nodes import Member

from .support import ALICE, BOB, VALIDATOR, Harness, staffed_pool

pytestmark = pytest.mark.usefixtures("every_database_slow")


@pytest.fixture
def harness() -> Harness:
    """Alice has the one place."""
    return staffed_pool(workers=(ALICE,), validators=(VALIDATOR,), requirements={"places": 1})


def is_full(harness: Harness, key: str = BOB) -> bool:
    try:
        harness.join(key)
    except PoolError as error:
        assert error.status == 403 and "this run is full: it has places for 1 workers" in str(error)
        return True
    return False


def leaves(harness: Harness, key: str) -> None:
    harness.pool.members.drain(key)
    assert harness.beat(key, wants=False).state == "left"


def test_nobody_joins_a_full_run_but_who_is_in_it(harness: Harness) -> None:
    assert is_full(harness) and harness.pool.members.role(BOB) is None
    assert not is_full(harness, ALICE), "a restart"
    harness.join("d" * 64, "relay")


def test_a_worker_that_leaves_makes_room_and_waits_for_it_when_it_returns(harness: Harness) -> None:
    leaves(harness, ALICE)
    assert not is_full(harness, BOB) and is_full(harness, ALICE)
    leaves(harness, BOB)
    assert not is_full(harness, ALICE)


def test_a_silent_worker_makes_room_after_the_timeout(harness: Harness) -> None:
    harness.beat(ALICE)
    harness.clock.now_s += 29
    assert is_full(harness)
    harness.clock.now_s += 2
    assert not is_full(harness)


@pytest.mark.parametrize("event", ["dismiss", "ban"])
def test_a_worker_that_may_not_work_any_more_makes_room(harness: Harness, event: str) -> None:
    node = harness.pool.db.nodes.get(ALICE)
    assert isinstance(node, Member)
    harness.pool.db.connection.change(
        "UPDATE nodes SET state = ? WHERE key = ?", {"dismiss": "dismissed", "ban": "banned"}[event], ALICE
    )
    assert not is_full(harness)
