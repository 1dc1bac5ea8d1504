"""The share of a worker's submissions that is fully checked, the random draw, and the consequences of a lie."""

import json
import random

import pytest

from shoal.coordinator import trust
from shoal.protocol.messages import Claim, Reason

from .support import ALICE, BOB, OTHER_VALIDATOR, VALIDATOR, Harness, staffed_pool

pytestmark = pytest.mark.usefixtures("every_database_slow")

USELESS = (False, False)  # fills no batch, so that any number can be uploaded


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    """Return a pool in which two passed checks halve the share, down to a tenth. By default every check is full."""
    monkeypatch.setattr(trust, "TRUST_AFTER", 2)
    monkeypatch.setattr(trust, "UNCHECKED_SHARE", 1.0)
    harness = staffed_pool(validator={"check_floor": 0.1})
    harness.pool.judgement.trust.random = lambda: 0.0
    return harness


def share(harness: Harness, key: str = ALICE) -> float:
    return harness.pool.judgement.trust.share(key)


def trusted(harness: Harness, key: str = ALICE) -> None:
    """Let two submissions pass. From then on, half are checked."""
    for _ in range(2):
        harness.accepted(key, useful=USELESS)
    assert share(harness, key) == 0.5


def claimed(harness: Harness, key: str = ALICE) -> Claim:
    task = harness.upload(key)
    claim = harness.claimed()
    assert claim.assignment.id == task.id
    return claim


def test_the_share_halves_with_every_two_passed_checks_down_to_its_floor(harness: Harness) -> None:
    shares = [share(harness)]
    for _ in range(10):
        harness.accepted(useful=USELESS)
        shares.append(share(harness))
    assert shares == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.1, 0.1, 0.1]
    assert share(harness, BOB) == 1, "each worker must have its own share"


def test_by_default_everything_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "TRUST_AFTER", 1)
    harness = staffed_pool(workers=(ALICE,), validators=())
    for _ in range(5):
        assert harness.accepted(useful=USELESS) and share(harness) == 1
    assert all(harness.pool.trust.draw(ALICE, 2) for _ in range(200))
    assert isinstance(harness.pool.trust.random.__self__, random.SystemRandom)  # type: ignore[attr-defined]


@pytest.mark.parametrize("reason", [Reason.UNREADABLE, Reason.BOUNDS])
def test_any_rejection_takes_all_trust_away(harness: Harness, reason: Reason) -> None:
    trusted(harness)
    harness.rejected(reason)
    assert share(harness) == 1 and harness.beat().state == "running"
    harness.accepted(useful=USELESS)
    assert share(harness) == 1, "only checks passed after the rejection may count"
    harness.accepted(useful=USELESS)
    assert share(harness) == 0.5


def test_unchecked_work_earns_no_trust(harness: Harness) -> None:
    trusted(harness)
    harness.draws(*[0.9] * 6)
    for _ in range(6):
        harness.accepted(useful=USELESS)
    assert share(harness) == 0.5
    last = list(harness.pool.db.ledger.entries(kind="accepted"))
    assert [json.loads(entry.body)["full"] for entry in last] == [True] * 2 + [False] * 6


@pytest.mark.parametrize(("drawn", "full"), [(0.0, True), (0.4999, True), (0.5, False), (0.9999, False)])
def test_the_random_number_decides_the_draw(harness: Harness, drawn: float, full: bool) -> None:
    trusted(harness)
    harness.draws(drawn)
    assert claimed(harness).full == full


def test_a_draw_is_kept_when_the_submission_is_claimed_again(harness: Harness) -> None:
    trusted(harness)
    harness.draws(0.9)  # one draw; a second one would raise
    assert not claimed(harness).full
    again = harness.claim()
    assert again is not None and not again.full, (
        "the draw changed when the validator claimed it again, as after a restart"
    )
    harness.clock.now_s += 300.5
    other = harness.claim(OTHER_VALIDATOR)
    assert other is not None and not other.full, "the draw changed when another validator claimed it after the lease"


def test_each_submission_is_drawn_separately(harness: Harness) -> None:
    trusted(harness)
    for _ in range(3):
        harness.upload()
    harness.draws(0.9, 0.1, 0.6)
    assert [claim.full for claim in harness.claims(VALIDATOR, 3)] == [False, True, False]


# --- a lie is rejected -----------------------------------------------------------------------------------------------


def waiting(harness: Harness) -> list[str]:
    rows = harness.pool.db.connection.rows(
        "SELECT submission FROM groups WHERE useful AND batch IS NULL AND NOT stale ORDER BY seq"
    )
    return [submission for (submission,) in rows]


def test_an_eviction_drops_the_workers_unbatched_groups_checked_or_not(harness: Harness) -> None:
    trusted(harness)
    harness.draws(0.0, 0.9, 0.9, 0.0)
    checked = harness.accepted(useful=(True, False))
    unchecked = harness.accepted(useful=(True, False))
    harness.upload(BOB)
    lied = harness.upload()
    harness.pool.judgement.trust.random = lambda: 0.0
    claims = harness.claims(VALIDATOR, 2)
    harness.judge(claims[0].assignment.id, useful=(True, False))
    assert waiting(harness) == [checked.id, unchecked.id, claims[0].assignment.id]
    harness.judge(lied.id, Reason.PROOF)
    assert harness.beat().state == "evicted"
    assert waiting(harness) == [claims[0].assignment.id], "another worker's group must stay"
    assert harness.status().stale_groups == 2


def test_an_eviction_does_not_change_a_full_batch(harness: Harness) -> None:
    trusted(harness)
    harness.draws(0.9, 0.9, 0.0)
    harness.accepted(useful=(True, True))
    harness.accepted(useful=(True, True))
    before = harness.pool.batches.of_step(0)
    assert before.ready
    harness.rejected(Reason.PROOF)
    assert harness.pool.batches.of_step(0) == before and harness.status().stale_groups == 0
