"""What a coordinator writes while it serves a run: `work.jsonl`, and at the end a summary and a picture."""

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from shoal.coordinator.folder import KEY
from shoal.coordinator.http import serving
from shoal.coordinator.http.routes import Coordinator
from shoal.coordinator.http.serving import WorkLog
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Evaluation, PolicyVersion, Reason, StepReport

from ..support import ALICE, BOB, FILE, Harness, config

pytestmark = pytest.mark.usefixtures("every_database_slow")
USELESS = (False, False)  # fills no batch, so any number can be accepted


# --- summary and picture ---------------------------------------------------------------------------------------------


def finish(folder: Path) -> None:
    """Write a coordinator's folder as a finished run of six steps leaves it."""
    coordinator = Coordinator(config(), "pool", Identity.load_or_create(folder / KEY), folder)
    for step in range(6):
        coordinator.pool.learning.trained(StepReport(step=step, metrics={"perf/tokens": 10.0}, trained=[]))
    for version, final in ((0, False), (6, True)):
        coordinator.pool.learning.published(PolicyVersion(version=version, digest="a" * 64, size_bytes=1))
        evaluation = Evaluation(version=version, greedy=version / 10, sampled=None, n=4, final=final)
        coordinator.pool.learning.evaluated(evaluation)


def serve(folder: Path, *, reports: bool, until: Path) -> None:
    """Serve until the file `until` exists."""
    stop = threading.Event()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {"record_to": None, "reports": reports}
    thread = threading.Thread(
        target=serving.serve_forever, args=(config(), "pool", folder, port, stop), kwargs=options, daemon=True
    )
    thread.start()
    deadline_s = time.monotonic() + 60
    while not until.exists() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    stop.set()
    thread.join(60)


@pytest.mark.parametrize("record_s, until", [(0.01, "reward.png"), (1e9, "coordinator.json")], ids=["later", "at once"])
def test_a_finished_pool_writes_a_summary_and_a_picture_whenever_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_s: float, until: str
) -> None:
    monkeypatch.setattr(serving, "RECORD_S", record_s)
    finish(tmp_path)
    serve(tmp_path, reports=True, until=tmp_path / until)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["tokens_trained"], summary["heldout_after"]["greedy"]) == (6, 60, 0.6)
    assert summary["restarts"] is None
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_a_coordinator_that_shoal_run_started_writes_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "RECORD_S", 0.01)
    finish(tmp_path)
    serve(tmp_path, reports=False, until=tmp_path / "evaluations.jsonl")
    assert not (tmp_path / "summary.json").exists()


# --- work.jsonl ------------------------------------------------------------------------------------------------------


def submissions(work: WorkLog) -> list[int]:
    """Return the numbers of the submissions among the next lines."""
    return [line["submission"] for line in work.new() if line["kind"] == "submission"]


def test_a_submission_is_recorded_when_it_settles(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PAGE", 2)
    work = WorkLog(harness.pool.db.connection, [])
    slow = harness.task(BOB)
    for _ in range(5):
        harness.accepted(ALICE, useful=USELESS)
    assert [submissions(work) for _ in range(4)] == [[2, 3], [4, 5], [6], []]
    assert [line["submission"] for line in work.in_progress()] == [1]
    harness.pool.assignments.uploaded(BOB, slow.id, FILE)
    assert work.in_progress()[0]["state"] == "uploaded"
    harness.judge(harness.claimed().assignment.id, Reason.BOUNDS)
    assert (submissions(work), submissions(work), work.in_progress()) == ([1], [], [])


def test_after_a_restart_only_new_work_is_recorded(harness: Harness) -> None:
    first = WorkLog(harness.pool.db.connection, [])
    harness.accepted(ALICE, useful=USELESS)
    lines = first.new()
    assert {line["kind"] for line in lines} == {"submission", "version"}
    harness.accepted(ALICE, useful=USELESS)
    second = WorkLog(harness.pool.db.connection, json.loads(json.dumps(lines)))
    assert (submissions(second), second.new()) == ([2], [])


def test_a_line_has_the_verdict_and_the_groups_but_no_key_or_nonce(harness: Harness) -> None:
    harness.join("d" * 64, name="dora")
    tasks = [harness.upload("d" * 64) for _ in range(2)]
    for task, reason in zip(tasks, (None, Reason.PROOF), strict=True):
        harness.claim()
        harness.judge(task.id, reason, (True, False))
    accepted, rejected = (
        line for line in WorkLog(harness.pool.db.connection, []).new() if line["kind"] == "submission"
    )
    assert (accepted["worker"], accepted["state"]) == ("dora", "accepted")
    assert [group["useful"] for group in accepted["group_list"]] == [True, False]
    assert (rejected["reason"], rejected["detail"]) == ("proof", "the proof is of other weights")
    text = json.dumps([accepted, rejected])
    assert "d" * 16 not in text and not any(task.nonce in text for task in tasks)
