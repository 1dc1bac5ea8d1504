"""A reader that asks with its last cursor misses nothing and gets nothing twice."""

import pytest

from shoal.coordinator import history as history_module
from shoal.protocol.history import MAX_SAMPLES, RunHistory
from shoal.protocol.messages import GroupResult, Sample, StepReport

from .support import ALICE, VALIDATOR, Desk, verdict

SAMPLE = Sample(task="1+1", prompt="1+1=", completion="2", reward=1.0, tokens=2)


def report(step: int, loss: float) -> StepReport:
    return StepReport(step=step, metrics={"loss": loss}, trained=[])


def test_a_step_that_is_reported_again_replaces_the_earlier_report_at_the_reader_too(desk: Desk) -> None:
    reader = RunHistory()
    desk.pool.learning.trained(report(0, 1.0))
    desk.pool.learning.trained(report(1, 2.0))
    assert reader.add(desk.pool.history.after(reader.cursor))
    assert not reader.add(desk.pool.history.after(reader.cursor))
    desk.pool.learning.trained(report(0, 3.0))  # the learner was restarted before it could remember the step
    assert reader.add(desk.pool.history.after(reader.cursor))
    assert [step["loss"] for step in reader.metrics] == [3.0, 2.0]
    assert desk.pool.status().trained == 2


def test_a_long_history_comes_in_pages(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "PAGE", 2)
    for step in range(5):
        desk.pool.learning.trained(report(step, step))
    reader, pages = RunHistory(), 0
    while reader.add(desk.pool.history.after(reader.cursor)):
        pages += 1
    assert (pages, [step["loss"] for step in reader.metrics]) == (3, [0.0, 1.0, 2.0, 3.0, 4.0])


def accept_with_sample(desk: Desk) -> str:
    task = desk.upload(ALICE)
    desk.claim(VALIDATOR)
    desk.contents += 1
    said = verdict(task.id, None, (True, True), f"{desk.contents:064x}")
    groups = [GroupResult(reward_mean=0.5, useful=False, tokens=2, sample=SAMPLE)]
    desk.pool.submissions.accepted_stored(VALIDATOR, task.id, "8" * 64)
    desk.pool.submissions.judge(VALIDATOR, said.model_copy(update={"groups": groups}))
    return task.id


def test_an_accepted_groups_sample_says_whose_it_is_and_is_kept_once(desk: Desk) -> None:
    id = accept_with_sample(desk)
    (sample,) = desk.pool.history.after(0).samples
    assert (sample.submission, sample.group, sample.worker, sample.policy_version) == (id, 0, "worker-a", 0)
    assert sample.completion == "2"
    stored = desk.pool.db.one("SELECT verdict FROM submissions WHERE id = ?", id)["verdict"]
    assert "completion" not in stored, "the text is not stored a second time with the verdict"


def test_only_the_newest_samples_are_kept(desk: Desk) -> None:
    first = accept_with_sample(desk)
    for number in range(MAX_SAMPLES):
        desk.pool.history.put("sample", f"other/{number}", "{}")
    desk.pool.history.put_samples([])
    assert desk.pool.db.one("SELECT 1 FROM history WHERE key = ?", f"{first}/0") is None
    assert desk.pool.db.one("SELECT count(*) AS n FROM history")["n"] == MAX_SAMPLES
