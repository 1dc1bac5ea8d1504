"""A reader that continues from its last cursor misses nothing and gets nothing twice."""

import json

import pytest

from shoal.coordinator import database as history_module
from shoal.protocol.history import MAX_SAMPLES, RunHistory
from shoal.protocol.messages import GroupResult, Sample, StepReport

from .support import ALICE, VALIDATOR, Harness, verdict

pytestmark = pytest.mark.usefixtures("every_database")


SAMPLE = Sample(task="1+1", prompt="1+1=", completion="2", reward=1.0, tokens=2)
SAMPLE_OF_A = SAMPLE.model_dump() | {"submission": "a-0", "group": 0, "worker": "a", "policy_version": 0}


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
    monkeypatch.setattr(history_module, "OWN_PAGE_BYTES", two)
    monkeypatch.setattr(history_module, "READ_ROWS", 3)
    for step in range(5):
        harness.pool.learning.trained(report(step, step))
    reader, pages = RunHistory(), 0
    while reader.add(harness.pool.db.history.after(reader.cursor)):
        pages += 1
    assert (pages, [step["loss"] for step in reader.metrics]) == (3, [0.0, 1.0, 2.0, 3.0, 4.0])


def test_a_page_is_bounded_in_bytes_and_a_larger_entry_is_sent_alone(harness: Harness) -> None:
    size_bytes = history_module.PAGE_BYTES // 5
    for number in range(12):
        task = "x" * (size_bytes if number != 7 else 2 * history_module.PAGE_BYTES)
        harness.pool.db.history.put("sample", f"a/{number}", json.dumps(SAMPLE_OF_A | {"completion": task}))
    cursor, sizes = 0, []
    while (page := json.loads(data := harness.pool.db.history.page(cursor)))["cursor"] != cursor:
        cursor = page["cursor"]
        sizes.append((len(page["samples"]), len(data) <= history_module.PAGE_BYTES + 200))
    assert sizes == [(4, True), (3, True), (1, False), (4, True)]


def accept_with_sample(harness: Harness) -> str:
    task = harness.upload(ALICE)
    harness.claim(VALIDATOR)
    harness.contents += 1
    given = verdict(task.id, None, (True, True), f"{harness.contents:064x}")
    groups = [GroupResult(reward_mean=0.5, useful=False, tokens=2, sample=SAMPLE)]
    harness.pool.judgement.accepted_stored(VALIDATOR, task.id, "8" * 64)
    harness.pool.judgement.judge(VALIDATOR, given.model_copy(update={"groups": groups}))
    return task.id


def test_an_accepted_groups_sample_names_its_worker_and_is_stored_once(harness: Harness) -> None:
    id = accept_with_sample(harness)
    (sample,) = harness.pool.db.history.after(0).samples
    assert (sample.submission, sample.group, sample.worker, sample.policy_version) == (id, 0, "worker-a", 0)
    assert sample.completion == "2"
    stored = harness.pool.db.connection.value("SELECT verdict FROM submissions WHERE id = ?", id)
    assert "completion" not in stored, "the text is not stored a second time with the verdict"


def test_only_the_newest_samples_are_kept(harness: Harness) -> None:
    first = accept_with_sample(harness)
    for number in range(MAX_SAMPLES):
        harness.pool.db.history.put("sample", f"other/{number}", "{}")
    harness.pool.db.history.put_samples([])
    assert not harness.pool.db.history.has("sample", f"{first}/0")
    assert harness.pool.db.history.count("sample") == MAX_SAMPLES
