"""The coordinator's metrics of a step, by source and by target length, and its Prometheus metrics."""

from typing import Any

import pytest

from shoal.protocol.messages import MILLION, Evaluation, GroupResult, Heartbeat, Outcomes, Reason, Stats, StepReport

from .support import ALICE, BOB, VALIDATOR, Harness, metrics_of, open_pool, staffed_pool

pytestmark = pytest.mark.usefixtures("every_database")


def group(source: str, scores: list[float], *, target: int = 0, penalty: float = 0.0, **fields: Any) -> GroupResult:
    """Return a group of completions with these scores, 10 tokens each. A reward is the score minus the penalty."""
    outcomes = fields.pop("outcomes", Outcomes(graded=len(scores)))
    return GroupResult(
        source=source,
        target_length=target,
        reward_mean=sum(scores) / len(scores) - penalty,
        score_millionths=round(sum(scores) * MILLION),
        outcomes=outcomes,
        useful=len(set(scores)) > 1,
        tokens=10 * len(scores),
        **fields,
    )


def credited(harness: Harness, *groups: GroupResult) -> dict[str, float]:
    """Return the first step's metrics, computed from these groups."""
    harness.pool.batches.credit("a-0", 0, groups)
    harness.pool.learning.trained(StepReport(step=0, metrics={}, trained=[]))
    return harness.pool.db.history.after(0).metrics[0]


def test_each_source_has_its_own_rewards_outcomes_and_filter_counts(harness: Harness) -> None:
    metrics = credited(
        harness,
        group("sums", [1, 0], outcomes=Outcomes(graded=1, wrong_format=1)),
        group("sums", [1, 1]),
        group("sums", [0, 0]),
        group("sums", [0.5, 0.5]),
        group("code", [0.25, 0.5]),
    )
    expected = {
        "reward/sums/mean": 0.5,
        "score/sums/mean": 0.5,
        "reward/code/mean": 0.375,
        "outcome/sums/wrong_format": 0.125,
        "outcome/sums/grader_error": 0.0,
        "outcome/code/wrong_format": 0.0,
        "filtered/sums": 3.0,
        "filtered/sums/all_right": 1.0,
        "filtered/sums/all_wrong": 1.0,
        "filtered/code": 0.0,
        "score/mean": 4.75 / 10,
    }
    assert {name: metrics.get(name) for name in expected} == expected
    assert not [name for name in metrics if name.startswith("length")], (
        "a length metric is given although no group has a target"
    )


def test_each_of_several_rewards_has_its_own_mean_by_source(harness: Harness) -> None:
    metrics = credited(
        harness,
        group("sums", [1, 0], parts={"mine.py:exact": 1.0, "number": 0.25}),
        group("sums", [1, 0, 0, 0, 0, 0], parts={"mine.py:exact": 0.0, "number": 0.25}),
        group("code", [1, 0], parts={"number": 0.75}),
        group("plain", [1, 0]),
    )
    assert {name: mean for name, mean in metrics.items() if name.startswith("part/")} == {
        "part/sums/mine.py:exact": 0.25,
        "part/sums/number": 0.25,
        "part/code/number": 0.75,
    }


def test_each_target_has_its_own_length_score_reward_and_penalty(harness: Harness) -> None:
    metrics = credited(
        harness,
        group("sums", [1, 0], target=8, penalty=0.25),
        group("sums", [1, 1], target=8, penalty=0.25),
        group("sums", [1, 0], target=20, penalty=0.5),
    )
    expected = {
        "length/8/mean": 10.0,
        "length/8/reward": 0.5,
        "length/8/score": 0.75,
        "length/8/penalty": 0.25,
        "length/20/reward": 0.0,
        "length/20/penalty": 0.5,
        "length_penalty/mean": pytest.approx(1 / 3),
        "score/mean": pytest.approx(2 / 3),
        "reward/mean": pytest.approx(1 / 3),
    }
    assert {name: metrics.get(name) for name in expected} == expected


@pytest.mark.parametrize("online_filter", [True, False])
def test_a_group_with_a_grader_error_is_counted_and_never_trained_on(online_filter: bool) -> None:
    harness = open_pool(online_filter=online_filter)
    failed = Outcomes(graded=1, grader_error=1)
    metrics = credited(
        harness,
        group("sums", [1, 0], outcomes=failed),
        group("sums", [0, 0], outcomes=failed),
    )
    assert metrics["outcome/sums/grader_error"] == 0.5 and metrics["filtered/sums"] == 0
    status = harness.status()
    assert status.have == 0 and status.signal.groups == 2
    assert status.grading.model_dump() == {"total": 4, "recent": 4, "errors": 2}


def test_old_grader_errors_are_forgotten(harness: Harness) -> None:
    errors = group("sums", [0] * 16, outcomes=Outcomes(grader_error=16))
    harness.pool.batches.credit("a-0", 0, [errors, errors])
    # Together with one of the two failed groups, these are the newest 512 rollouts.
    harness.pool.batches.credit("a-1", 0, [group("sums", [1] * 15 + [0])] * 31)
    grading = harness.status().grading
    assert (grading.total, grading.recent, grading.errors) == (33 * 16, 512, 16)


def test_prometheus_metrics_are_by_source() -> None:
    harness = open_pool()
    harness.join(ALICE)
    harness.join(VALIDATOR, "validator")
    credited(harness, group("sums", [1, 1]), group("code", [0, 0]), group("code", [0.5, 0.5]), group("code", [1, 0]))
    metrics = metrics_of(harness.metrics())
    expected = {
        'shoal_graded_rollouts_total{outcome="graded",source="code"}': 6,
        'shoal_graded_rollouts_total{outcome="wrong_format",source="code"}': 0,
        'shoal_filtered_groups_total{scores="all_right",source="sums"}': 1,
        'shoal_filtered_groups_total{scores="all_wrong",source="code"}': 1,
        'shoal_filtered_groups_total{scores="other",source="code"}': 1,
        'shoal_source_reward_mean{source="sums"}': 1.0,
        'shoal_source_reward_mean{source="code"}': 1 / 3,
    }
    assert {name: metrics.get(name) for name in expected} == pytest.approx(expected)


def test_scores_beyond_one_per_completion_are_refused() -> None:
    with pytest.raises(ValueError, match="exceeds a score of 1 per completion"):
        group("sums", [1, 1], outcomes=Outcomes(graded=1))


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_prometheus_metrics_count_submissions_verdicts_and_nodes() -> None:
    harness = staffed_pool(prompts_per_step=20)
    harness.accepted()
    unchecked = harness.upload()
    harness.pool.db.connection.change("UPDATE submissions SET full_check = FALSE WHERE id = ?", unchecked.id)
    assert not harness.claimed().full
    harness.judge(unchecked.id, useful=(True, False))
    lied = harness.upload(BOB)
    harness.clock.now_s += 7
    harness.claim()
    harness.judge(lied.id, Reason.PROOF)
    harness.upload()
    harness.clock.now_s += 3
    harness.task()
    stats = Stats(tokens=12, busy_s=1.5)
    harness.pool.members.heartbeat(VALIDATOR, Heartbeat(policy_version=0, stats=stats))
    metrics = metrics_of(harness.metrics())
    expected = {
        'shoal_submissions{state="open"}': 1,
        'shoal_submissions{state="uploaded"}': 1,
        'shoal_submissions{state="accepted"}': 2,
        'shoal_submissions{state="rejected"}': 1,
        'shoal_submissions{state="expired"}': 0,
        "shoal_queue_age_seconds": 3,
        "shoal_verdicts_total": 3,
        "shoal_verdicts_full_total": 2,
        "shoal_verdict_seconds_total": 7,
        'shoal_rejections_total{reason="proof"}': 1,
        "shoal_accepted_tokens_total": 40,
        "shoal_evicted_nodes": 1,
        'shoal_node_silence_seconds{name="worker-a",role="worker"}': 0,
        'shoal_node_tokens{name="validator-e",role="validator"}': 12,
        'shoal_node_busy_seconds{name="validator-e",role="validator"}': 1.5,
    }
    assert {name: metrics.get(name) for name in expected} == expected
    assert not [name for name in metrics if "worker-b" in name], "evicted Bob must not be shown"


def test_prometheus_metrics_show_steps_rewards_and_accuracy(harness: Harness) -> None:
    new = metrics_of(harness.metrics())
    for name in ("steps_trained_total", "verdicts_total", "queue_age_seconds", "newest_version", "open_step"):
        assert new[f"shoal_{name}"] == 0
    assert "shoal_reward_mean" not in new and "shoal_heldout_accuracy" not in "".join(new), (
        "metrics without a measurement must be missing"
    )
    harness.accepted()
    harness.publish(1, 2)
    for version in (1, 2):
        harness.pool.learning.trained(StepReport(step=version - 1, metrics={"reward/mean": version / 8}, trained=[]))
        accuracy = {"greedy": version / 4, "sampled": version / 16}
        harness.pool.learning.evaluated(Evaluation(version=version, n=4, final=False, **accuracy))
    metrics = metrics_of(harness.metrics())
    learned = {
        "shoal_steps_trained_total": 2,
        "shoal_reward_mean": 0.25,
        'shoal_heldout_accuracy{kind="greedy"}': 0.5,
        'shoal_heldout_accuracy{kind="sampled"}': 0.125,
    }
    assert {name: metrics.get(name) for name in learned} == learned
