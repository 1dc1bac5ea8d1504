"""A pool killed at any moment reopens in a consistent state, and readers of its history miss nothing."""

import json
import logging
import multiprocessing
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from shoal.coordinator import database
from shoal.ledger.chain import verify_chain
from shoal.protocol.history import MAX_SAMPLES, RunHistory
from shoal.protocol.messages import GroupResult, Reason, Sample, StepReport

from .support import ALICE, BOB, COORDINATOR, OTHER_VALIDATOR, VALIDATOR, Harness, open_pool, verdict

pytestmark = pytest.mark.usefixtures("every_database")


def scenario(harness: Harness, die_at: int) -> None:
    """Do a short run. Die inside the transaction of ledger entry `die_at` (0: never)."""
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
    harness.join(OTHER_VALIDATOR, "validator")
    harness.publish(0)
    harness.accepted()
    harness.rejected(Reason.PROOF, BOB)
    harness.accepted()
    harness.pool.learning.trained(StepReport(step=0, metrics={}, trained=[]))
    harness.publish(1)


KINDS = [*["registered"] * 4, "policy", "accepted", "rejected", "slashed", "accepted", "batch", "trained", "policy"]


@pytest.mark.parametrize("die_at", [1, 6, 7, 8, 9, 10, 11])
def test_a_pool_killed_inside_a_transaction_reopens_as_before_that_transaction(tmp_path: Path, die_at: int) -> None:
    path = tmp_path / "pool.sqlite"
    killed = multiprocessing.get_context("fork").Process(target=lambda: scenario(open_pool(path), die_at))
    killed.start()
    killed.join(120)
    assert killed.exitcode == 9
    harness = open_pool(path)
    whole = die_at - 1 - (die_at in (8, 10))  # "slashed" and "batch" share the transaction of the entry before
    assert harness.kinds() == KINDS[:whole]
    verify_chain(harness.pool.db.ledger.entries(), COORDINATOR.public)
    status = harness.status()
    accepted = KINDS[:whole].count("accepted")
    in_batches = 4 if harness.pool.batches.of_step(0).ready else 0
    assert status.have + in_batches == 2 * accepted, "a group must be credited exactly when its submission is accepted"
    assert sum(node.accepted for node in status.nodes) == accepted
    assert bool(status.slashed) == ("slashed" in KINDS[:whole])
    assert status.trained == KINDS[:whole].count("trained")
    if die_at in (6, 7, 9, 10):  # it died while it recorded a verdict, which the validator repeats
        validator = OTHER_VALIDATOR if die_at == 7 else VALIDATOR
        claim = harness.claim(validator)
        assert claim is not None
        harness.judge(claim.assignment.id, validator=validator)
        assert "accepted" in harness.kinds()[whole:]


def test_a_reopened_pool_is_unchanged(tmp_path: Path) -> None:
    harness = open_pool(tmp_path / "pool.sqlite")
    scenario(harness, die_at=0)
    assert harness.kinds() == KINDS
    held = harness.task(version=1)
    before = harness.status()
    harness.pool.db.connection.close()
    again = open_pool(tmp_path / "pool.sqlite")
    assert again.status() == before.model_copy(update={"notices": []})  # notices are in memory
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
    assert harness.status().have == 0 and caplog.records == [], "an undone verdict must not be logged"
    harness.judge(task.id)
    assert harness.status().have == 2


# --- history ---------------------------------------------------------------------------------------------------------


SAMPLE = Sample(task="1+1", prompt="1+1=", completion="2", reward=1.0, tokens=2)


def report(step: int, loss: float) -> StepReport:
    return StepReport(step=step, metrics={"loss": loss}, trained=[])


def test_a_repeated_report_of_a_step_replaces_the_earlier_one_for_readers_too(harness: Harness) -> None:
    reader = RunHistory()
    harness.pool.learning.trained(report(0, 1.0))
    harness.pool.learning.trained(report(1, 2.0))
    assert reader.add(harness.pool.db.history.after(reader.cursor))
    assert not reader.add(harness.pool.db.history.after(reader.cursor))
    harness.pool.learning.trained(report(0, 3.0))  # the learner was restarted
    assert reader.add(harness.pool.db.history.after(reader.cursor))
    assert [step["loss"] for step in reader.metrics] == [3.0, 2.0]
    assert harness.status().trained == 2


def test_a_long_history_comes_in_pages(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    two = 2 * len(json.dumps({"step": 0.0, "time_s": harness.clock.now_s, "loss": 0.0}))
    monkeypatch.setattr(database, "OWN_PAGE_BYTES", two)
    monkeypatch.setattr(database, "READ_ROWS", 3)
    for step in range(5):
        harness.pool.learning.trained(report(step, step))
    reader, pages = RunHistory(), 0
    while reader.add(harness.pool.db.history.after(reader.cursor)):
        pages += 1
    assert (pages, [step["loss"] for step in reader.metrics]) == (3, [0.0, 1.0, 2.0, 3.0, 4.0])


def test_a_page_is_bounded_in_bytes_and_a_larger_entry_is_sent_alone(harness: Harness) -> None:
    size_bytes = database.PAGE_BYTES // 5
    for number in range(12):
        task = "x" * (size_bytes if number != 7 else 2 * database.PAGE_BYTES)
        harness.pool.db.history.put("step", f"{number}", json.dumps({"text": task}))
    cursor, sizes = 0, []
    while (page := json.loads(data := harness.pool.db.history.page(cursor)))["cursor"] != cursor:
        cursor = page["cursor"]
        sizes.append((len(page["metrics"]), len(data) <= database.PAGE_BYTES + 200))
    assert sizes == [(4, True), (3, True), (1, False), (4, True)]


def accept_with_sample(harness: Harness) -> str:
    task = harness.upload(ALICE)
    harness.claim(VALIDATOR)
    groups = [GroupResult(reward_mean=0.5, useful=False, tokens=2, sample=SAMPLE)]
    harness.pool.judgement.accepted_stored(VALIDATOR, task.id, "8" * 64)
    harness.pool.judgement.judge(VALIDATOR, verdict(task.id, groups=groups))
    return task.id


def test_an_accepted_groups_sample_names_its_worker_and_is_stored_once(harness: Harness) -> None:
    id = accept_with_sample(harness)
    (sample,) = harness.pool.db.history.after(0).samples
    assert (sample.submission, sample.group, sample.worker, sample.policy_version) == (id, 0, "worker-a", 0)
    assert sample.completion == "2"
    assert json.loads(harness.pool.db.history.page(0))["samples"] == [], "nobody else may see completions and rewards"
    stored = harness.pool.db.connection.value("SELECT verdict FROM submissions WHERE id = ?", id)
    assert "completion" not in stored, "the text must not be stored a second time with the verdict"


def test_only_the_newest_samples_are_kept(harness: Harness) -> None:
    first = accept_with_sample(harness)
    for number in range(MAX_SAMPLES):
        harness.pool.db.history.put("sample", f"other/{number}", "{}")
    harness.pool.db.history.put_samples([])
    assert not harness.pool.db.history.has("sample", f"{first}/0")
    assert harness.pool.db.history.count("sample") == MAX_SAMPLES
