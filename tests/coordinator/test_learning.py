import json

import pytest

from shoal.coordinator.database import PoolError
from shoal.protocol.messages import Evaluation, Policy, StepReport

from .support import CAROL, VALIDATOR, Harness, advance

pytestmark = pytest.mark.usefixtures("every_database")


def test_a_trained_step_is_noted_with_the_rewards_of_all_its_groups(harness: Harness) -> None:
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


def test_a_version_keeps_the_digest_that_it_was_published_with(harness: Harness) -> None:
    harness.publish(0)
    assert harness.kinds().count("policy") == 1, "the same report again changes nothing"
    with pytest.raises(PoolError, match="another digest"):
        harness.pool.learning.published(Policy(version=0, digest="f" * 64, size_bytes=1))


def evaluation(version: int, *, final: bool) -> Evaluation:
    return Evaluation(version=version, greedy=0.5, sampled=None, n=4, final=final)


def test_workers_end_with_the_last_version_and_the_run_with_its_evaluation(harness: Harness) -> None:
    harness.join(CAROL, "relay")
    harness.pool.learning.evaluated(evaluation(0, final=False))
    harness.publish(6)
    assert harness.beat(version=0).state == "finished" and harness.beat(VALIDATOR, 0).state == "finished"
    assert harness.beat(CAROL, 0).state == "running" and harness.status().state == "running"
    harness.pool.learning.evaluated(evaluation(6, final=True))
    assert harness.beat(CAROL, 0).state == "finished" and harness.status().state == "finished"
    assert [e.version for e in harness.pool.db.history.after(0).evaluations] == [0, 6]


def test_the_status_counts_what_validators_counted(harness: Harness) -> None:
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


def test_groups_are_counted_for_the_open_step(harness: Harness) -> None:
    advance(harness, 1)
    harness.accepted(useful=(False, False))
    assert (harness.status().signal.groups, harness.status().signal.useful) == (2, 0)
