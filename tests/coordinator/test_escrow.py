"""When credit is released or forfeited, and how much of a batch may be unchecked."""

import json
from typing import Any

import pytest

from shoal.config import sections
from shoal.config.sections import ValidatorSection
from shoal.coordinator import trust
from shoal.protocol.messages import GroupResult, Reason, StepReport

from .support import ALICE, BOB, VALIDATOR, Harness, staffed_pool

pytestmark = pytest.mark.usefixtures("every_database")

USELESS = (False, False)  # earns 20 tokens and fills no batch, so that any number can be uploaded


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    """Return a pool in which one passed check halves the share of checks, and credit waits for two later checks."""
    monkeypatch.setattr(trust, "TRUST_AFTER", 1)
    monkeypatch.setattr(sections, "MIN_ESCROW_CHECKS", 2)
    return staffed_pool(validator={"check_floor": 0.5})


def credit(harness: Harness, key: str = ALICE) -> tuple[int, int, int]:
    tokens = harness.pool.judgement.escrow.tokens_by_credit()
    return tuple(tokens.get((key, name), 0) for name in ("pending", "credited", "forfeited"))  # type: ignore[return-value]


def entries(harness: Harness, kind: str) -> list[dict[str, Any]]:
    return [json.loads(entry.body) for entry in harness.pool.db.ledger.entries(kind=kind)]


def test_credit_waits_for_later_full_checks(harness: Harness) -> None:
    harness.draws(0.0, 0.9, 0.9, 0.0, 0.9, 0.0)
    credits = []
    for _ in range(6):
        harness.accepted(useful=USELESS)
        credits.append(credit(harness))
    # Checked, unchecked, unchecked, checked, unchecked, checked: the last two checks cover the first three submissions.
    assert credits == [(20, 0, 0), (40, 0, 0), (60, 0, 0), (80, 0, 0), (100, 0, 0), (60, 60, 0)]
    [entry] = entries(harness, "credited")
    assert entry["worker"] == ALICE and entry["tokens"] == 60 and len(entry["submissions"]) == 3
    node = next(node for node in harness.status().nodes if node.name == "worker-a")
    assert (node.pending, node.credited) == (60, 60)


def test_a_slashed_worker_loses_pending_credit_and_keeps_final_credit(harness: Harness) -> None:
    harness.pool.judgement.trust.random = lambda: 0.0
    for _ in range(3):
        harness.accepted(useful=USELESS)
    harness.accepted(BOB, useful=USELESS)
    harness.rejected(Reason.PROOF)
    assert credit(harness) == (0, 20, 40) and credit(harness, BOB) == (20, 0, 0)
    assert entries(harness, "forfeited")[0]["tokens"] == 40


def test_the_runs_end_releases_pending_credit_once(harness: Harness) -> None:
    harness.accepted(useful=USELESS)
    harness.rejected(Reason.UNREADABLE)
    assert credit(harness) == (20, 0, 0), "a soft rejection must take no credit"
    for step in (4, 5, 5):
        harness.pool.learning.trained(StepReport(step=step, metrics={}, trained=[]))
        assert credit(harness) == ((20, 0, 0) if step == 4 else (0, 20, 0))
    assert len(entries(harness, "credited")) == 1


def test_work_accepted_after_the_last_step_is_paid_at_once(harness: Harness) -> None:
    """The credit is not escrowed, because no later work could cover it."""
    earlier, late = harness.upload(), harness.upload(BOB)
    harness.claims(VALIDATOR, 2)
    harness.judge(earlier.id, None, USELESS)
    harness.end()
    harness.judge(late.id, None, USELESS)
    assert credit(harness) == credit(harness, BOB) == (0, 20, 0)
    assert [entry["worker"] for entry in entries(harness, "credited")] == [ALICE, BOB]


def test_the_escrow_grows_as_the_share_of_checks_falls() -> None:
    assert [ValidatorSection(check_floor=floor).escrow_checks for floor in (1.0, 0.1, 0.05)] == [16, 16, 20]


def test_while_unchecked_groups_fill_half_a_batch_every_submission_is_checked(harness: Harness) -> None:
    """Batches have four groups; a draw of 0.9 means no full check."""
    harness.pool.judgement.trust.random = lambda: 0.9
    ids = [harness.accepted(useful=useful).id for useful in ((True, False), (True, True), (True, False))]
    full = [task.full_check for id in ids if (task := harness.pool.db.submissions.get(id))]
    assert full == [True, False, True], "the third must be checked, because two unchecked groups wait"
    assert harness.pool.batches.of_step(0).ready
    rows = harness.pool.db.connection.rows("SELECT checked FROM groups WHERE batch = 0 ORDER BY seq")
    assert [bool(checked) for (checked,) in rows] == [True, False, False, True]


def test_unchecked_groups_beyond_the_share_wait_for_the_next_batch(harness: Harness) -> None:
    groups = harness.pool.db.groups
    for number, checked in enumerate([False] * 5 + [True]):
        result = GroupResult(reward_mean=0.5, useful=True, tokens=10)
        groups.add(f"s{number}", 0, result, version=0, useful=True, checked=checked, accepted_during=0)
    assert groups.count_waiting(max_unchecked=2) == 3
    assert [id for id, *_ in groups.oldest_waiting(4, max_unchecked=2)] == [1, 2, 6]
