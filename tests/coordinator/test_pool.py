"""Killed or failing at any moment, the pool is whole when it is opened again."""

import multiprocessing
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from shoal.ledger.chain import verify_chain
from shoal.protocol.messages import Reason, StepReport

from .support import ALICE, BOB, COORDINATOR, VALIDATOR, Desk, open_pool


def scenario(desk: Desk, die_at: int) -> None:
    """A run in small, during which the process dies inside the transaction of ledger entry `die_at`."""
    append = desk.pool.db.ledger.append

    def append_or_die(kind: str, body: Any) -> Any:
        entry = append(kind, body)
        if entry.seq == die_at:
            os._exit(9)
        return entry

    desk.pool.db.ledger.append = append_or_die  # type: ignore[method-assign]
    for key in (ALICE, BOB):
        desk.join(key)
    desk.join(VALIDATOR, "validator")
    desk.publish(0)
    desk.accepted()
    lied = desk.upload(BOB)
    desk.claim(VALIDATOR)
    desk.judge(lied.id, Reason.PROOF)
    desk.accepted()
    desk.pool.learning.trained(StepReport(step=0, metrics={}, trained=[]))
    desk.publish(1)


KINDS = [*["registered"] * 3, "policy", "accepted", "rejected", "slashed", "accepted", "trained", "policy"]


@pytest.mark.parametrize("die_at", [1, 5, 6, 7, 8, 9])
def test_killed_inside_a_transaction_the_pool_reopens_as_before_it(tmp_path: Path, die_at: int) -> None:
    path = tmp_path / "pool.sqlite"
    killed = multiprocessing.get_context("fork").Process(target=lambda: scenario(open_pool(path), die_at))
    killed.start()
    killed.join(30)
    assert killed.exitcode == 9
    desk = open_pool(path)
    whole = die_at - 1 - (die_at == 7)  # "rejected" and "slashed" are of one transaction
    assert desk.kinds() == KINDS[:whole]
    verify_chain(desk.pool.db.ledger.entries(), COORDINATOR.public)
    status = desk.pool.status()
    accepted = KINDS[:whole].count("accepted")
    in_batches = 4 if desk.pool.batches.of_step(0).ready else 0
    assert status.have + in_batches == 2 * accepted, "a group is credited exactly when its submission is accepted"
    assert sum(node.accepted for node in status.nodes) == accepted
    assert bool(status.slashed) == ("slashed" in KINDS[:whole])
    assert status.trained == KINDS[:whole].count("trained")
    if die_at in (5, 6, 8):  # it died with a verdict: the validator asks again, and is heard
        claim = desk.claim(VALIDATOR)
        assert claim is not None
        desk.contents = 100
        desk.judge(claim.assignment.id)
        assert desk.kinds()[-1] == "accepted"


def test_a_pool_that_is_reopened_goes_on_where_it_was(tmp_path: Path) -> None:
    desk = open_pool(tmp_path / "pool.sqlite")
    scenario(desk, die_at=0)
    assert desk.kinds() == KINDS
    held = desk.task(version=1)
    before = desk.pool.status()
    desk.pool.db.connection.close()
    again = open_pool(tmp_path / "pool.sqlite")
    assert again.pool.status() == before
    assert again.task(version=1) == held
    assert again.pool.batches.of_step(0).ready


def test_a_failing_ledger_leaves_no_trace_of_the_verdict(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    task = desk.upload()
    desk.claim(VALIDATOR)

    def full(kind: str, body: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(desk.pool.db.ledger, "append", full)
        with pytest.raises(sqlite3.OperationalError):
            desk.judge(task.id)
    assert desk.pool.status().have == 0
    desk.judge(task.id)
    assert desk.pool.status().have == 2
