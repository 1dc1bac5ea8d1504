"""`/metrics`: every line is one that Prometheus reads, and the figures are the pool's."""

import pytest

from shoal.ledger.connection import SqliteConnection
from shoal.protocol.messages import Evaluation, Heartbeat, Reason, Stats, StepReport

from .support import ALICE, BOB, VALIDATOR, Harness, metrics_of, staffed_pool

pytestmark = pytest.mark.usefixtures("every_database")


def test_every_line_of_a_new_pool_is_valid(harness: Harness) -> None:
    found = metrics_of(harness.metrics())
    assert found["shoal_verdicts_total"] == 0
    assert found['shoal_submissions{state="open"}'] == 0
    assert found["shoal_queue_age_seconds"] == 0
    assert found["shoal_newest_version"] == 0 and found["shoal_open_step"] == 0


def test_it_counts() -> None:
    harness = staffed_pool(validators=(VALIDATOR,), prompts_per_step=20)
    harness.accepted()
    harness.accepted(useful=(True, False))
    lied = harness.upload(BOB)
    harness.clock.now_s += 7
    harness.claim()
    harness.judge(lied.id, Reason.PROOF)
    harness.upload()
    harness.clock.now_s += 3
    harness.task()
    stats = Stats(tokens=12, busy_s=1.5)
    harness.pool.members.heartbeat(VALIDATOR, Heartbeat(policy_version=0, stats=stats))
    found = metrics_of(harness.metrics())
    expected = {
        'shoal_submissions{state="open"}': 1,
        'shoal_submissions{state="uploaded"}': 1,
        'shoal_submissions{state="accepted"}': 2,
        'shoal_submissions{state="rejected"}': 1,
        'shoal_submissions{state="expired"}': 0,
        "shoal_queue_age_seconds": 3,
        "shoal_verdicts_total": 3,
        "shoal_verdicts_full_total": 3,
        "shoal_verdict_seconds_total": 7,
        'shoal_rejections_total{reason="proof"}': 1,
        "shoal_accepted_tokens_total": 40,
        "shoal_evicted_nodes": 1,
        'shoal_node_silence_seconds{name="worker-a",role="worker"}': 0,
        'shoal_node_tokens{name="validator-e",role="validator"}': 12,
        'shoal_node_busy_seconds{name="validator-e",role="validator"}': 1.5,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert not [name for name in found if "worker-b" in name], "it is evicted"


def test_it_shows_what_was_learned(harness: Harness) -> None:
    new = metrics_of(harness.metrics())
    assert new["shoal_steps_trained_total"] == 0
    assert "shoal_reward_mean" not in new and "shoal_heldout_accuracy" not in "".join(new), "nothing was measured yet"
    harness.accepted()
    for version in (1, 2):
        harness.pool.learning.trained(StepReport(step=version - 1, metrics={"reward/mean": version / 8}, trained=[]))
        accuracy = {"greedy": version / 4, "sampled": version / 16}
        harness.pool.learning.evaluated(Evaluation(version=version, n=4, final=False, **accuracy))
    found = metrics_of(harness.metrics())
    learned = {
        "shoal_steps_trained_total": 2,
        "shoal_reward_mean": 0.25,
        'shoal_heldout_accuracy{kind="greedy"}': 0.5,
        'shoal_heldout_accuracy{kind="sampled"}': 0.125,
    }
    assert {name: found.get(name) for name in learned} == learned


def test_a_verdict_without_a_prefill_is_not_a_full_one(harness: Harness) -> None:
    harness.upload(ALICE)
    harness.pool.db.connection.change("UPDATE submissions SET full_check = FALSE")
    claim = harness.claim()
    assert claim is not None and not claim.full
    harness.judge(claim.assignment.id)
    found = metrics_of(harness.metrics())
    assert (found["shoal_verdicts_total"], found["shoal_verdicts_full_total"]) == (1, 0)


def test_reading_it_changes_nothing(harness: Harness) -> None:
    harness.accepted()
    connection = harness.pool.db.connection
    if not isinstance(connection, SqliteConnection):
        pytest.skip("only SQLite counts the changes of a connection")
    before = connection.sqlite.total_changes
    assert harness.metrics() == harness.metrics()
    assert connection.sqlite.total_changes == before
