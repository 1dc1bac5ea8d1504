"""Nonces: the same for the same assignment, another for any other, and known to nobody before it is given out."""

from pathlib import Path

import pytest

from shoal.coordinator.assignment import assignment_nonce, nonce_secret
from shoal.protocol.identity import Identity

from .support import ALICE, BOB, COORDINATOR, Harness, open_pool


def test_it_follows_from_the_coordinators_key_alone() -> None:
    assert nonce_secret(COORDINATOR) == nonce_secret(Identity(COORDINATOR.private_key))
    assert nonce_secret(COORDINATOR) != nonce_secret(Identity.generate())


@pytest.mark.parametrize("changed", [{"run": "r1"}, {"worker": BOB}, {"number": 1}, {"version": 1}, {"secret": b"t"}])
def test_any_other_assignment_has_another_one(changed: dict[str, object]) -> None:
    names = {"secret": b"s", "run": "r", "worker": ALICE, "number": 0, "version": 0}
    assert assignment_nonce(**names) == assignment_nonce(**names)  # type: ignore[arg-type]
    assert assignment_nonce(**names) != assignment_nonce(**(names | changed))  # type: ignore[arg-type]


def test_no_two_assignments_share_one(harness: Harness) -> None:
    nonces = {harness.accepted(key, useful=(False, False)).nonce for key in (ALICE, BOB) for _ in range(8)}
    assert len(nonces) == 16 and all(len(nonce) == 32 for nonce in nonces)


def test_after_kill_9_of_the_coordinator_the_same_assignment_has_the_same_nonce(tmp_path: Path) -> None:
    before = open_pool(tmp_path / "pool.sqlite")
    before.join(ALICE)
    before.publish(0)
    given = before.task()
    after = open_pool(tmp_path / "pool.sqlite", before.clock)  # nothing was closed
    assert after.task() == given


def test_the_ledger_records_it_with_the_verdict(harness: Harness) -> None:
    task = harness.accepted()
    entry = next(iter(harness.pool.db.ledger.entries(kind="accepted")))
    assert f'"nonce":"{task.nonce}"' in entry.body.replace(" ", "") and '"version":0' in entry.body.replace(" ", "")
