"""Each settled submission, version and download is told once, in whichever order things settle, and after a restart too."""

import json

import pytest

from shoal.coordinator import journal as journal_module
from shoal.coordinator.journal import Journal
from shoal.protocol.messages import Reason

from .support import ALICE, BOB, Harness

pytestmark = pytest.mark.usefixtures("every_database")


def told(journal: Journal) -> list[int]:
    """Numbers of the submissions among the next lines."""
    return [line["submission"] for line in journal.new() if line["kind"] == "submission"]


def test_a_submission_that_settles_late_is_told_when_it_settles(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "PAGE", 2)
    journal = Journal(harness.pool.db.connection, [])
    slow = harness.task(BOB)
    for _ in range(5):
        harness.accepted(ALICE, useful=(False, False))
    assert [told(journal) for _ in range(4)] == [[2, 3], [4, 5], [6], []]
    assert [line["submission"] for line in journal.under_way()] == [1]
    harness.pool.assignments.uploaded(BOB, slow.id, "7" * 64)
    assert journal.under_way()[0]["state"] == "uploaded"
    claim = harness.claim()
    assert claim
    harness.judge(claim.assignment.id, Reason.BOUNDS)
    assert (told(journal), told(journal), journal.under_way()) == ([1], [], [])


def test_a_restart_tells_only_what_is_new(harness: Harness) -> None:
    first = Journal(harness.pool.db.connection, [])
    harness.accepted(ALICE, useful=(False, False))
    lines = first.new()
    assert {line["kind"] for line in lines} == {"submission", "version"}
    harness.accepted(ALICE, useful=(False, False))
    second = Journal(harness.pool.db.connection, json.loads(json.dumps(lines)))
    assert [line["submission"] for line in second.new()] == [2]
    assert second.new() == []


def test_a_line_holds_what_became_of_the_groups_and_no_key_or_nonce(harness: Harness) -> None:
    harness.join("d" * 64, name="dora")
    task = harness.upload("d" * 64)
    claim = harness.claim()
    assert claim
    harness.judge(task.id, None, (True, False))
    [line] = [line for line in Journal(harness.pool.db.connection, []).new() if line["kind"] == "submission"]
    assert (line["worker"], line["state"], line["file"]) == ("dora", "accepted", "8" * 64)
    assert [group["useful"] for group in line["group_list"]] == [True, False]
    text = json.dumps(line)
    assert "d" * 32 not in text and task.nonce not in text
