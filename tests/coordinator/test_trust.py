"""How much is checked of whom, that nobody can foresee it, and what a liar's unchecked work comes to."""

import json
import random

import pytest

from shoal.protocol.messages import Claim, Reason

from .support import ALICE, BOB, OTHER_VALIDATOR, VALIDATOR, Desk, open_pool

USELESS = (False, False)  # fills no batch, so that any number can be handed in


@pytest.fixture
def desk() -> Desk:
    """Two submissions found honest halve the share, down to a tenth. Every draw is "check it" until a test says else."""
    desk = open_pool(validator={"trust_after": 2, "check_floor": 0.1})
    for key in (ALICE, BOB):
        desk.join(key)
    for key in (VALIDATOR, OTHER_VALIDATOR):
        desk.join(key, "validator")
    desk.publish(0)
    desk.pool.submissions.trust.random = lambda: 0.0
    return desk


def share(desk: Desk, key: str = ALICE) -> float:
    return desk.pool.submissions.trust.share(key)


def trusted(desk: Desk, key: str = ALICE) -> None:
    """Found honest twice: half is checked from here on."""
    for _ in range(2):
        desk.accepted(key, useful=USELESS)
    assert share(desk, key) == 0.5


def claimed(desk: Desk, key: str = ALICE) -> Claim:
    task = desk.upload(key)
    claim = desk.claim()
    assert claim is not None and claim.assignment.id == task.id
    return claim


def test_the_share_halves_with_every_few_found_honest_down_to_its_floor(desk: Desk) -> None:
    found = [share(desk)]
    for _ in range(10):
        desk.accepted(useful=USELESS)
        found.append(share(desk))
    assert found == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.1, 0.1, 0.1]
    assert share(desk, BOB) == 1, "everybody earns their own"


def test_by_default_everything_is_checked() -> None:
    desk = open_pool(validator={"trust_after": 1})
    desk.join(ALICE)
    desk.publish(0)
    for _ in range(5):
        assert desk.accepted(useful=USELESS) and share(desk) == 1
    assert all(desk.pool.submissions.trust.draw(ALICE) for _ in range(200))


@pytest.mark.parametrize("reason", [Reason.UNREADABLE, Reason.BOUNDS])
def test_any_rejection_takes_all_trust_away(desk: Desk, reason: Reason) -> None:
    trusted(desk)
    desk.judge(claimed(desk).assignment.id, reason)
    assert share(desk) == 1 and desk.beat().state == "running"
    desk.accepted(useful=USELESS)
    assert share(desk) == 1, "it is counted from the rejection on"
    desk.accepted(useful=USELESS)
    assert share(desk) == 0.5


def test_what_was_not_checked_earns_no_trust(desk: Desk) -> None:
    trusted(desk)
    desk.draws(*[0.9] * 6)
    for _ in range(6):
        desk.accepted(useful=USELESS)
    assert share(desk) == 0.5
    last = list(desk.pool.db.ledger.entries(kind="accepted"))
    assert [json.loads(entry.body)["full"] for entry in last] == [True] * 2 + [False] * 6


@pytest.mark.parametrize(("drawn", "full"), [(0.0, True), (0.4999, True), (0.5, False), (0.9999, False)])
def test_the_draw_is_by_the_given_random_number(desk: Desk, drawn: float, full: bool) -> None:
    trusted(desk)
    desk.draws(drawn)
    assert claimed(desk).full == full


def test_the_numbers_are_the_systems() -> None:
    draw = open_pool().pool.submissions.trust.random
    assert isinstance(draw.__self__, random.SystemRandom)  # type: ignore[attr-defined]


def test_what_was_drawn_stays_when_it_is_handed_out_again(desk: Desk) -> None:
    trusted(desk)
    desk.draws(0.9)  # one draw; a second one would raise
    assert not claimed(desk).full
    again = desk.claim()
    assert again is not None and not again.full, "to the validator that restarted"
    desk.clock.now_s += 50.5
    other = desk.claim(OTHER_VALIDATOR)
    assert other is not None and not other.full, "to another after its lease"


def test_each_of_several_is_drawn_for_itself(desk: Desk) -> None:
    trusted(desk)
    for _ in range(3):
        desk.upload()
    desk.draws(0.9, 0.1, 0.6)
    assert [claim.full for claim in desk.claims(VALIDATOR, 3)] == [False, True, False]


# --- a liar is found -------------------------------------------------------------------------------------------------


def waiting(desk: Desk) -> list[str]:
    rows = desk.pool.db.connection.rows(
        "SELECT submission FROM groups WHERE useful AND batch IS NULL AND NOT stale ORDER BY seq"
    )
    return [submission for (submission,) in rows]


def test_unchecked_work_that_no_batch_has_yet_is_lost_with_its_workers_eviction(desk: Desk) -> None:
    trusted(desk)
    desk.draws(0.0, 0.9, 0.9, 0.0)
    checked = desk.accepted(useful=(True, False))
    unchecked = desk.accepted(useful=(True, False))
    desk.upload(BOB)
    lied = desk.upload()
    desk.pool.submissions.trust.random = lambda: 0.0
    claims = desk.claims(VALIDATOR, 2)
    desk.judge(claims[0].assignment.id, useful=(True, False))
    assert waiting(desk) == [checked.id, unchecked.id, claims[0].assignment.id]
    desk.judge(lied.id, Reason.PROOF)
    assert desk.beat().state == "evicted"
    assert waiting(desk) == [checked.id, claims[0].assignment.id], "what was checked, and another's, stays"
    assert desk.pool.status().stale_groups == 1


def test_a_batch_that_is_full_is_not_changed_by_an_eviction(desk: Desk) -> None:
    trusted(desk)
    desk.draws(0.9, 0.9, 0.0)
    desk.accepted(useful=(True, True))
    desk.accepted(useful=(True, True))
    before = desk.pool.batches.of_step(0)
    assert before.ready
    desk.judge(claimed(desk).assignment.id, Reason.PROOF)
    assert desk.pool.batches.of_step(0) == before and desk.pool.status().stale_groups == 0


def test_what_was_to_be_believed_when_its_worker_was_evicted_is_checked_after_all(desk: Desk) -> None:
    """Both were claimed together: the verdict on the second, made without a prefill, comes after the eviction."""
    trusted(desk)
    lied, believed = desk.upload(), desk.upload()
    desk.draws(0.1, 0.9)
    assert [claim.full for claim in desk.claims(VALIDATOR, 2)] == [True, False]
    desk.judge(lied.id, Reason.PROOF)
    with pytest.raises(Exception, match="not claimed by this validator"):
        desk.judge(believed.id)
    assert waiting(desk) == []
    desk.draws(0.99)
    again = desk.claim()
    assert again is not None and (again.assignment.id, again.full) == (believed.id, True)
