"""After a kill or a failure at any moment, the pool reopens in a consistent state."""

import logging
import multiprocessing
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from shoal.ledger.chain import verify_chain
from shoal.protocol.messages import Reason, StepReport

from .support import ALICE, BOB, COORDINATOR, VALIDATOR, Harness, open_pool

pytestmark = pytest.mark.usefixtures("every_database")


def scenario(harness: Harness, die_at: int) -> None:
    """A short run in which the process dies inside the transaction of ledger entry `die_at`."""
    append = harness.pool.db.ledger.append

    def append_or_die(kind: str, body: Any) -> Any:
        entry = append(kind, body)
        if entry.seq == die_at:
            os._exit(9)
        return entry

    harness.pool.db.ledger.append = append_or_die  # type: ignore[method-assign]
    for key in (ALICE, BOB):
        harness.join(key)
    harness.join(VALIDATOR, "validator")
    harness.publish(0)
    harness.accepted()
    harness.rejected(Reason.PROOF, BOB)
    harness.accepted()
    harness.pool.learning.trained(StepReport(step=0, metrics={}, trained=[]))
    harness.publish(1)


KINDS = [*["registered"] * 3, "policy", "accepted", "rejected", "slashed", "accepted", "batch", "trained", "policy"]


@pytest.mark.parametrize("die_at", [1, 5, 6, 7, 8, 9, 10])
def test_killed_inside_a_transaction_the_pool_reopens_as_before_it(tmp_path: Path, die_at: int) -> None:
    path = tmp_path / "pool.sqlite"
    killed = multiprocessing.get_context("fork").Process(target=lambda: scenario(open_pool(path), die_at))
    killed.start()
    killed.join(120)
    assert killed.exitcode == 9
    harness = open_pool(path)
    whole = die_at - 1 - (die_at in (7, 9))  # "slashed" and "batch" are of the transaction of the entry before
    assert harness.kinds() == KINDS[:whole]
    verify_chain(harness.pool.db.ledger.entries(), COORDINATOR.public)
    status = harness.status()
    accepted = KINDS[:whole].count("accepted")
    in_batches = 4 if harness.pool.batches.of_step(0).ready else 0
    assert status.have + in_batches == 2 * accepted, "a group is credited exactly when its submission is accepted"
    assert sum(node.accepted for node in status.nodes) == accepted
    assert bool(status.slashed) == ("slashed" in KINDS[:whole])
    assert status.trained == KINDS[:whole].count("trained")
    if die_at in (5, 6, 8, 9):  # it died with a verdict, which the validator repeats
        harness.contents = 100
        harness.judge(harness.claimed().assignment.id)
        assert "accepted" in harness.kinds()[whole:]


def test_a_reopened_pool_is_unchanged(tmp_path: Path) -> None:
    harness = open_pool(tmp_path / "pool.sqlite")
    scenario(harness, die_at=0)
    assert harness.kinds() == KINDS
    held = harness.task(version=1)
    before = harness.status()
    harness.pool.db.connection.close()
    again = open_pool(tmp_path / "pool.sqlite")
    assert again.status() == before
    assert again.task(version=1) == held
    assert again.pool.batches.of_step(0).ready


def test_a_failing_ledger_leaves_no_trace_of_the_verdict(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    task = harness.upload()
    harness.claim(VALIDATOR)

    def full(kind: str, body: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    caplog.set_level(logging.INFO, logger="shoal.coordinator")
    with monkeypatch.context() as patch:
        patch.setattr(harness.pool.db.ledger, "append", full)
        with pytest.raises(sqlite3.OperationalError):
            harness.judge(task.id)
    assert harness.status().have == 0 and caplog.records == [], "an undone verdict is not logged"
    harness.judge(task.id)
    assert harness.status().have == 2
