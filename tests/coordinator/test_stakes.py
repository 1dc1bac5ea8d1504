"""Admission by stake: what a stranger must have ready, and what must stay at risk while it gets tasks."""

import pytest

from shoal.coordinator.credit import BookedStakes, ChainStakes
from shoal.coordinator.database import PoolError
from shoal.coordinator.pool import Pool
from shoal.ledger.stakes import UNSTAKE_S
from shoal.protocol.messages import Booking, Reason

from .support import ALICE, BOB, VALIDATOR, Harness, staffed_pool, strangers, verdict

pytestmark = pytest.mark.usefixtures("every_database_slow")
LEAST = 100


@pytest.fixture
def harness(every_database_slow: str) -> Harness:
    return staffed_pool(workers=(), validators=(VALIDATOR,), requirements={"stake": LEAST})


def booked(pool: Pool) -> BookedStakes:
    assert isinstance(pool.members.stakes, BookedStakes)
    return pool.members.stakes


def book(harness: Harness, kind: str, amount: int = 0) -> None:
    booked(harness.pool).book(Booking(kind=kind, key=ALICE, amount=amount))  # type: ignore[arg-type]


def test_a_deposit_lets_a_stranger_in_and_becomes_its_stake(harness: Harness) -> None:
    book(harness, "stake", 60)
    with pytest.raises(PoolError, match="has staked 60, an open invite needs 100") as caught:
        harness.pool.members.register(ALICE, strangers(), None)
    assert caught.value.status == 403 and harness.pool.members.role(ALICE) is None
    book(harness, "stake", 40)
    for _ in range(2):  # the second time it is a restart
        answer = harness.pool.members.register(ALICE, strangers(), None)
        assert answer.name == f"stranger-{ALICE[:16]}" and booked(harness.pool).at_risk(ALICE) == 100
    assert harness.beat().assignment is not None


def test_who_takes_its_stake_back_gets_no_more_tasks(harness: Harness) -> None:
    book(harness, "stake", 100)
    harness.pool.members.register(ALICE, strangers(), None)
    book(harness, "unstake", 1)
    answer = harness.beat()
    assert answer.assignment is None and "stake: 99 is at risk on this key" in answer.waiting_for
    with pytest.raises(PoolError, match="nothing to withdraw"):
        book(harness, "withdraw")
    harness.clock.now_s += UNSTAKE_S
    book(harness, "withdraw")
    book(harness, "stake", 1)
    assert harness.beat().assignment is not None


def test_who_was_invited_needs_no_stake(harness: Harness) -> None:
    harness.join(BOB)
    assert harness.beat(BOB).assignment is not None


def test_a_slash_takes_the_stake_for_the_pool(harness: Harness) -> None:
    book(harness, "stake", 100)
    harness.pool.members.register(ALICE, strangers(), None)
    task = harness.task()
    harness.pool.assignments.uploaded(ALICE, task.id, "0" * 64)
    harness.pool.judgement.claim(VALIDATOR, 1)
    harness.pool.judgement.judge(VALIDATOR, verdict(task.id, Reason.PROOF, (), "1" * 64))
    accounts = booked(harness.pool).accounts
    assert (accounts.pool(), booked(harness.pool).at_risk(ALICE)) == (100, 0)


def test_what_the_accounts_forbid_is_refused_and_changes_nothing(harness: Harness) -> None:
    before = harness.pool.db.ledger.head()
    for kind in ("unstake", "withdraw"):
        with pytest.raises(PoolError):
            book(harness, kind, 5)
    assert harness.pool.db.ledger.head() == before


def test_on_a_chain_only_what_was_read_there_as_at_risk_earns_tasks(harness: Harness) -> None:
    stakes = ChainStakes()
    harness.pool.members.stakes = stakes
    stakes.offers = {ALICE: LEAST}
    harness.pool.members.register(ALICE, strangers(), None, payer="0x" + "1" * 40)
    assert harness.beat().assignment is None, "its deposit can still be taken back"
    stakes.members = {ALICE: LEAST}
    assert harness.beat().assignment is not None
    [entry] = [entry for entry in harness.pool.db.ledger.entries(kind="registered") if ALICE in entry.body]
    assert '"payer":"0x1111111111111111111111111111111111111111"' in entry.body
