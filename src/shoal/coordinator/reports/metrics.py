"""The pool's figures in Prometheus' text format: what `/metrics` answers.

Invariant: it changes nothing. Every figure is the coordinator's own, or a validator's, the learner's or the evaluator's
report, except a node's tokens and busy seconds, whose help text says that the node reports them.
Called by the coordinator's open route.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shoal.coordinator.reports.history import HistoryLog
from shoal.coordinator.standing.suspension import left_s
from shoal.coordinator.state.database import Database
from shoal.coordinator.tables.submissions import State
from shoal.protocol.messages import Outcomes, Stats

Samples = Iterable[tuple[Mapping[str, str], float]]  # labels, value


def read_metrics(db: Database, history: HistoryLog) -> str:
    registry = CollectorRegistry()
    registry.register(_Figures([*_submissions(db), *_grades(db), *_training(db, history), *_nodes(db)]))
    return generate_latest(registry).decode()


class _Figures(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self.metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self.metrics


def _submissions(db: Database) -> Iterator[Metric]:
    states, oldest_s = db.submissions.count_by_state(), db.submissions.oldest_upload_s()
    reasons, verdicts = db.submissions.count_by_reason(), db.submissions.verdict_totals()
    age_s = db.clock() - oldest_s if oldest_s is not None else 0
    every_state = [({"state": state}, states.get(state, 0)) for state in get_args(State)]
    every_reason = [({"reason": reason}, count) for reason, count in reasons.items()]
    yield _gauge("submissions", "Submissions by state.", every_state)
    yield _gauge("queue_age_seconds", "Age of the oldest upload without a verdict.", [({}, age_s)])
    yield _counter("verdicts", "Verdicts given.", [({}, verdicts.count)])
    yield _counter("verdicts_full", "Verdicts that rest on a prefill.", [({}, verdicts.full_checks)])
    yield _counter("verdict_seconds", "Time from upload to verdict, summed.", [({}, verdicts.waited_s)])
    yield _counter("rejections", "Rejections by reason.", every_reason)
    yield _counter("accepted_tokens", "Completion tokens accepted.", [({}, db.groups.totals().tokens)])


def _grades(db: Database) -> Iterator[Metric]:
    sources = db.grades.by_source().items()
    yield _counter(
        "graded_rollouts",
        "Accepted rollouts by source of their task and outcome of grading.",
        [
            ({"source": source, "outcome": outcome}, getattr(scored, outcome))
            for source, scored in sources
            for outcome in Outcomes.model_fields
        ],
    )
    yield _counter(
        "filtered_groups",
        "Groups with equal rewards that the online filter left out, by source and by what their rollouts scored.",
        [
            ({"source": source, "scores": scores}, number)
            for source, scored in sources
            for scores, number in {
                "all_right": scored.all_right,
                "all_wrong": scored.all_wrong,
                "other": scored.filtered - scored.all_right - scored.all_wrong,
            }.items()
        ],
    )


def _training(db: Database, history: HistoryLog) -> Iterator[Metric]:
    version, step, evaluation = db.policies.newest(), history.newest_step() or {}, history.newest_evaluation()
    reward = step.get("reward/mean")
    accuracies = {"greedy": evaluation.greedy, "sampled": evaluation.sampled} if evaluation else {}
    yield _gauge("open_step", "The smallest step that lacks accepted groups.", [({}, db.open_step())])
    yield _counter("steps_trained", "Steps that the learner has trained.", [({}, db.history.count("step"))])
    yield _gauge(
        "newest_version",
        "The newest published policy version; -1 if there is none.",
        [({}, -1 if version is None else version)],
    )
    yield _gauge(
        "reward_mean",
        "Mean reward of all groups accepted during the newest trained step.",
        [] if reward is None else [({}, reward)],
    )
    yield _gauge(
        "source_reward_mean",
        "Mean reward of the groups of one source, accepted during the newest trained step.",
        [
            ({"source": parts[1]}, step[name])
            for name in step
            if len(parts := name.split("/")) == 3 and parts[0] == "reward"
        ],
    )
    yield _gauge(
        "heldout_accuracy",
        "Accuracy on held-out tasks in the newest evaluation.",
        [({"kind": kind}, accuracy) for kind, accuracy in accuracies.items() if accuracy is not None],
    )


def _nodes(db: Database) -> Iterator[Metric]:
    every = db.nodes.all()
    nodes = [({"name": node.name, "role": node.role}, node) for node in every if not node.evicted]
    stats = [(labels, Stats.model_validate_json(node.stats)) for labels, node in nodes]
    silence_s = [(labels, db.clock() - node.seen_s) for labels, node in nodes]
    yield _gauge("evicted_nodes", "Nodes that were slashed.", [({}, len(every) - len(nodes))])
    suspended = sum(1 for node in every if left_s(node, db.clock()))
    yield _gauge("suspended_nodes", "Nodes that get no tasks for a while.", [({}, suspended)])
    yield _gauge("node_silence_seconds", "Time since a node's last heartbeat.", silence_s)
    against = [(labels, db.evidence.of(node.key).evidence) for labels, node in nodes if node.role == "worker"]
    yield _gauge("worker_evidence", "Nats that a worker's submissions together speak against honesty.", against)
    yield _gauge(
        "node_tokens",
        "Tokens generated or checked, as the node reports.",
        [(labels, reported.tokens) for labels, reported in stats],
    )
    yield _gauge(
        "node_busy_seconds",
        "Time not spent waiting, as the node reports.",
        [(labels, reported.busy_s) for labels, reported in stats],
    )


def _gauge(name: str, documentation: str, samples: Samples) -> Metric:
    return _with(GaugeMetricFamily(f"shoal_{name}", documentation), samples)


def _counter(name: str, documentation: str, samples: Samples) -> Metric:
    return _with(CounterMetricFamily(f"shoal_{name}", documentation), samples, "_total")


def _with(metric: Metric, samples: Samples, suffix: str = "") -> Metric:
    for labels, value in samples:
        metric.add_sample(metric.name + suffix, dict(labels), value)
    return metric
