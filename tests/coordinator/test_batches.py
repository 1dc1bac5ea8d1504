import json

import pytest

from shoal.coordinator.database import PoolError
from shoal.protocol.messages import Evaluation, PolicyVersion, StepReport

from .support import ALICE, BOB, CAROL, OTHER_VALIDATOR, VALIDATOR, Harness, open_pool, staffed_pool

pytestmark = pytest.mark.usefixtures("every_database")


def groups(harness: Harness, step: int) -> list[tuple[str, int]]:
    batch = harness.pool.batches.of_step(step)
    assert batch.ready
    return [(group.submission, group.group) for group in batch.groups]


def test_a_batch_is_ready_when_it_is_full_of_useful_groups_oldest_first(harness: Harness) -> None:
    first = harness.accepted(useful=(False, True))
    second = harness.accepted(BOB)
    filling = harness.pool.batches.of_step(0)
    assert (filling.ready, filling.groups, harness.status().have, harness.status().need) == (False, [], 3, 4)
    third = harness.accepted()
    assert groups(harness, 0) == [(first.id, 1), (second.id, 0), (second.id, 1), (third.id, 0)]
    before = harness.pool.batches.of_step(0)
    assert harness.status().have == 1, "the fifth group must wait for the next step"
    harness.accepted()
    harness.accepted()
    assert harness.pool.batches.of_step(0) == before, "a full batch changed"
    assert harness.pool.batches.of_step(1).ready and not harness.pool.batches.of_step(2).ready


def test_leftover_groups_fill_further_batches_at_once(harness: Harness) -> None:
    harness.accepted(useful=(True,) * 11)
    assert [harness.pool.batches.of_step(step).ready for step in range(3)] == [True, True, False]
    assert harness.status().have == 3


def test_leftover_groups_within_the_async_level_fill_the_next_batch(harness: Harness) -> None:
    harness.accepted(useful=(True,) * 3)  # version 0
    harness.publish(1, 2, 3)
    for version in (1, 2):
        harness.accepted(version=version, useful=(True,) * 4)
    assert harness.status().step == 2, "two batches must be full, with three groups left over"
    harness.accepted(version=2, useful=(True,))
    assert groups(harness, 2)[-1][0] == f"{ALICE[:16]}-000003"
    assert harness.status().stale_groups == 0


def test_a_group_one_version_too_old_is_counted_stale_and_never_trained_on() -> None:
    harness = open_pool(async_level=1)
    harness.join(ALICE)
    harness.join(BOB)
    harness.join(VALIDATOR, "validator")
    harness.publish(0, 1, 2)
    old = harness.upload(BOB, 0)
    fresh = harness.upload(ALICE, 1)
    harness.claim(VALIDATOR)  # claims Bob's submission, whose verdict comes late
    harness.clock.now_s += 301
    harness.claim(OTHER_VALIDATOR)
    assert harness.claimed().assignment.id == fresh.id
    harness.judge(fresh.id, useful=(True,) * 8)
    assert harness.status().step == 2, "steps 0 and 1 must be full, so that version 0 is too old"
    harness.judge(old.id, validator=OTHER_VALIDATOR)
    assert harness.status().stale_groups == 2 and harness.status().have == 0
    harness.accepted(version=2, useful=(True,) * 4)
    assert old.id not in {submission for submission, _ in groups(harness, 2)}


def test_no_task_is_assigned_when_every_batch_is_full(harness: Harness) -> None:
    harness.accepted(useful=(True,) * 12)
    harness.publish(1, 2, 3)
    harness.accepted(version=3, useful=(True,) * 12)
    assert "every batch is full" in harness.beat(version=3).waiting_for


def test_without_the_filter_every_group_is_trained_on_and_equal_rewards_are_still_counted() -> None:
    harness = staffed_pool(workers=(ALICE,), validators=(VALIDATOR,), online_filter=False)
    first, second = (harness.accepted(useful=(False, True)) for _ in range(2))
    assert groups(harness, 0) == [(first.id, 0), (first.id, 1), (second.id, 0), (second.id, 1)]
    harness.pool.learning.trained(StepReport(step=0, metrics={}, trained=[first.id, second.id]))
    assert harness.pool.db.history.after(0).metrics[0]["reward/zero_std_frac"] == 0.5


# --- learning --------------------------------------------------------------------------------------------------------


def test_a_trained_step_is_recorded_with_the_rewards_of_all_its_groups(harness: Harness) -> None:
    harness.accepted(useful=(True, False))
    for loss in (1.0, 2.0):  # a learner that was killed reports the step again
        harness.pool.learning.trained(StepReport(step=0, metrics={"loss": loss}, trained=["b", "a", "a"]))
    (metrics,) = harness.pool.db.history.after(0).metrics
    assert metrics == {
        "step": 0.0,
        "time_s": 1_000.0,
        "loss": 2.0,
        "reward/mean": 0.5,
        "reward/zero_std_frac": 0.5,
    }
    (entry,) = harness.pool.db.ledger.entries(kind="trained")
    assert json.loads(entry.body) == {"step": 0, "submissions": ["a", "b"], "record": ""}


def test_a_version_keeps_its_first_digest(harness: Harness) -> None:
    harness.publish(0)
    assert harness.kinds().count("policy") == 1, "the repeated report was recorded again"
    with pytest.raises(PoolError, match="another digest"):
        harness.pool.learning.published(PolicyVersion(version=0, digest="f" * 64, size_bytes=1))


def evaluation(version: int, *, final: bool) -> Evaluation:
    return Evaluation(version=version, greedy=0.5, sampled=None, n=4, final=final)


def test_workers_finish_with_the_last_version_and_the_run_finishes_with_its_evaluation(harness: Harness) -> None:
    harness.join(CAROL, "relay")
    harness.pool.learning.evaluated(evaluation(0, final=False))
    harness.publish(6)
    assert harness.beat(version=0).state == "finished" and harness.beat(VALIDATOR, 0).state == "finished"
    assert harness.beat(CAROL, 0).state == "running" and harness.status().state == "running"
    harness.pool.learning.evaluated(evaluation(6, final=True))
    assert harness.beat(CAROL, 0).state == "finished" and harness.status().state == "finished"
    assert [e.version for e in harness.pool.db.history.after(0).evaluations] == [0, 6]


def test_the_status_counts_what_the_verdicts_accepted(harness: Harness) -> None:
    harness.accepted(useful=(True, False))
    status = harness.status()
    alice = next(node for node in status.nodes if node.name == "worker-a")
    assert (alice.accepted, alice.rejected, status.tokens_generated, status.have) == (1, 0, 20, 1)
    assert (status.step, status.steps, status.newest_version, status.started_s) == (0, 6, 0, 1_000.0)


def test_newest_groups_with_equal_rewards_are_counted(harness: Harness) -> None:
    assert harness.status().signal.model_dump() == {
        "groups": 0, "useful": 0, "flat": 0, "lowest": None, "highest": None,
    }  # fmt: skip
    harness.accepted(useful=(True, False))
    for _ in range(2):
        harness.accepted(useful=(False, False))
    signal = harness.status().signal
    assert (signal.groups, signal.useful, signal.flat) == (6, 1, 5)
    assert signal.lowest is not None and signal.lowest == signal.highest
    harness.accepted(useful=(True, True))
    assert harness.status().signal.flat == 0
    harness.accepted()
    harness.accepted(useful=(False, False))
    signal = harness.status().signal
    assert (harness.status().step, signal.groups, signal.useful) == (1, 2, 0), "groups of step 0 were counted"


def test_a_step_is_not_reported_before_its_batch_is_full(harness: Harness) -> None:
    """Otherwise a false report of the last step would end the second opinions and pay all pending credit."""
    learning = harness.pool.learning
    steps = [StepReport(step=step, metrics={}, trained=[]) for step in range(6)]
    harness.accepted(useful=(True,) * 8)  # two batches
    for early in (steps[2], steps[5]):
        with pytest.raises(PoolError, match=f"step {early.step + 1} cannot have been trained"):
            learning.reported(early)
    learning.reported(steps[1])
    learning.reported(steps[0])  # in any order, because several sites report
    learning.reported(steps[0])  # again, as after a restart from an older checkpoint


def test_an_evaluation_of_a_version_that_is_not_published_is_refused(harness: Harness) -> None:
    """Otherwise a false evaluation of the last version would end the run."""
    steps = harness.pool.config.run.steps
    last = Evaluation(version=steps, greedy=1.0, sampled=None, n=1, final=True)
    with pytest.raises(PoolError, match=f"version {steps} is not published"):
        harness.pool.learning.evaluated(last)
    assert not harness.pool.db.is_finished(steps)
    harness.publish(steps)
    harness.pool.learning.evaluated(last)
    assert harness.pool.db.is_finished(steps)
