"""Public reports on a run: its state (`/v1/status`), an offer to join it (`/v1/offer`), and Prometheus `/metrics`.

Responses are cached: a report that took t seconds to make is valid for t / SHARE - t seconds. So each report takes at
most SHARE of the coordinator's time, however many clients poll. The status takes milliseconds to make in a small pool,
and a second with 10,000 workers.

Invariants: nothing here changes state. The status does not grow with the run's length, and a node's report adds little
to it: of its download rates, only those from the pool's own servers are shown. Every metric is measured by the
coordinator or reported by a validator, the learner or the evaluator. The only exceptions are a node's tokens and busy
seconds; their help texts say that the node reports them.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shoal.config import Config
from shoal.coordinator.checkers import Fingerprints, Replays
from shoal.coordinator.credit import Escrow
from shoal.coordinator.database import Database
from shoal.coordinator.submissions import State
from shoal.coordinator.trust import EvidenceTable, max_unchecked, shared_evidence
from shoal.protocol.history import Exactness, Grading, NodeStatus, Status
from shoal.protocol.messages import VERSION, Capability, Outcomes, RunOffer, Stats

SHARE = 0.1
RECENT_ROLLOUTS = 512  # how many of the newest rollouts are searched for grader errors

Samples = Iterable[tuple[Mapping[str, str], float]]  # labels, value


class CachedBody:
    def __init__(self, make: Callable[[], str], monotonic: Callable[[], float] = time.monotonic) -> None:
        self.make, self.monotonic = make, monotonic
        self._body, self._until_s = b"", -1.0

    def get(self) -> bytes:
        """Return the response body, in UTF-8."""
        start_s = self.monotonic()
        if start_s < self._until_s:
            return self._body
        self._body = self.make().encode()
        took_s = self.monotonic() - start_s
        self._until_s = start_s + took_s / SHARE
        return self._body


def read_offer(db: Database, config: Config, run: str, key: str, invite: str, workers: int) -> RunOffer:
    """Return this run's description for machines that look for a run to join."""
    places = config.requirements.places
    return RunOffer(
        protocol=VERSION,
        run=run,
        key=key,
        model=config.model.name[:200],
        state="finished" if db.is_finished(config.run.steps) else "running",
        step=min(db.open_step(), config.run.steps),
        steps=config.run.steps,
        workers=workers,
        places_free=max(places - workers, 0) if places else None,
        requirements=config.requirements.model_dump(),
        invite=invite,
    )


def read_status(db: Database, config: Config, run: str, notices: Sequence[str]) -> Status:
    nodes = _nodes(db, config)
    tokens, stale, useful = db.groups.totals()
    replays = Replays(db.connection)
    return Status(
        run=run,
        state="finished" if db.is_finished(config.run.steps) else "running",
        step=db.open_step(),
        steps=config.run.steps,
        have=db.groups.count_waiting(max_unchecked=max_unchecked(config)),
        need=config.coordinator.prompts_per_step,
        newest_version=db.policies.newest(),
        started_s=db.started_s(),
        now_s=db.clock(),
        nodes=nodes,
        trained=db.history.count("step"),
        notices=list(notices),
        reject_reasons=db.submissions.count_by_reason(),
        slashed=[node.name for node in nodes if node.evicted and node.role == "worker"],  # others are only evicted
        stale_groups=stale,
        late_groups=db.submissions.groups_too_late(),
        useful_groups=useful,
        tokens_generated=tokens,
        signal=db.groups.signal(db.open_step()),
        exact=Exactness(**dict(zip(Exactness.model_fields, replays.totals(), strict=True))),
        grading=_grading(db, -(-RECENT_ROLLOUTS // config.sampling.group_size)),
    )


def _grading(db: Database, groups: int) -> Grading:
    recent, errors = db.grades.recent(groups)
    return Grading(total=db.grades.total(), recent=recent, errors=errors)


def _nodes(db: Database, config: Config) -> list[NodeStatus]:
    credit = Escrow(db, config).tokens_by_credit()
    evidence, fingerprints = EvidenceTable(db.connection).all(), Fingerprints(db.connection).newest()
    now_s = db.clock()
    counts, missed = db.submissions.count_by_worker_and_state(), db.submissions.count_missed()
    nodes = db.nodes.all()
    servers = {node.url for node in nodes if node.url and node.role in ("origin", "relay") and not node.evicted}
    return [
        NodeStatus(
            name=node.name,
            role=node.role,
            url=node.url,
            policy_version=node.version,
            seen_s=node.seen_s,
            evicted=node.evicted,
            state=node.state,
            reason=node.reason,
            suspended_s=node.suspended_s(now_s),
            suspension=node.reason if node.suspended_s(now_s) else "",
            accepted=counts.get((node.key, "accepted"), 0),
            rejected=counts.get((node.key, "rejected"), 0),
            missed=missed.get(node.key, 0),
            stats=_shown(Stats.model_validate_json(node.stats), servers),
            credited=credit.get((node.key, "credited"), 0),
            pending=credit.get((node.key, "pending"), 0),
            evidence=shared_evidence(evidence.get(node.key, {})),
            size=node.size,
            capability=Capability.model_validate_json(node.capability),
            fingerprint=fingerprints.get(node.key, ""),
        )
        for node in nodes
    ]


def _shown(stats: Stats, servers: Collection[str]) -> Stats:
    """Return a node's stats without download rates from other addresses, which could be any text of any length."""
    rates = {url: rate for url, rate in stats.intake.bytes_per_s.items() if url in servers}
    return stats.model_copy(update={"intake": stats.intake.model_copy(update={"bytes_per_s": rates})})


@dataclass
class _Metrics(Collector):
    db: Database

    def collect(self) -> Iterator[Metric]:
        for part in (_submissions, _grades, _training, _node_metrics):
            yield from part(self.db)


def read_metrics(db: Database) -> str:
    return generate_latest(_Metrics(db)).decode()


def _submissions(db: Database) -> Iterator[Metric]:
    states, oldest_s = db.submissions.count_by_state(), db.submissions.oldest_upload_s()
    reasons, (verdicts, full, waited_s) = db.submissions.count_by_reason(), db.submissions.verdict_totals()
    age_s = db.clock() - oldest_s if oldest_s is not None else 0
    every_state = [({"state": state}, states.get(state, 0)) for state in get_args(State)]
    every_reason = [({"reason": reason}, count) for reason, count in reasons.items()]
    yield _gauge("submissions", "Submissions by state.", every_state)
    yield _gauge("queue_age_seconds", "Age of the oldest upload without a verdict.", age_s)
    yield _counter("verdicts", "Verdicts given.", verdicts)
    yield _counter("verdicts_full", "Verdicts on submissions that were prefilled whole.", full)
    yield _counter("verdict_seconds", "Total time from upload to verdict.", waited_s)
    yield _counter("rejections", "Rejections by reason.", every_reason)
    yield _counter("accepted_tokens", "Completion tokens accepted.", db.groups.totals()[0])


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
        "Groups with equal rewards that the online filter left out, by source and score.",
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


def _training(db: Database) -> Iterator[Metric]:
    version, step = db.policies.newest(), db.history.newest_step()
    evaluation = db.history.newest_evaluation()
    reward = step.get("reward/mean")
    accuracies = {"greedy": evaluation.greedy, "sampled": evaluation.sampled} if evaluation else {}
    yield _gauge("open_step", "The smallest step whose batch is not full.", db.open_step())
    yield _counter("steps_trained", "Steps that the learner has trained.", db.history.count("step"))
    yield _gauge(
        "newest_version",
        "The newest published policy version; -1 if there is none.",
        -1 if version is None else version,
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


def _node_metrics(db: Database) -> Iterator[Metric]:
    every = db.nodes.all()
    nodes = [({"name": node.name, "role": node.role}, node) for node in every if not node.evicted]
    stats = [(labels, Stats.model_validate_json(node.stats)) for labels, node in nodes]
    silence_s = [(labels, db.clock() - node.seen_s) for labels, node in nodes]
    yield _gauge("evicted_nodes", "Nodes that were slashed, or evicted by the operator.", len(every) - len(nodes))
    suspended = sum(1 for node in every if node.suspended_s(db.clock()))
    yield _gauge("suspended_nodes", "Nodes that are suspended.", suspended)
    yield _gauge("node_silence_seconds", "Time since a node's last heartbeat.", silence_s)
    evidence = EvidenceTable(db.connection).all()
    against = [(labels, shared_evidence(evidence.get(node.key, {}))) for labels, node in nodes if node.role == "worker"]
    yield _gauge("worker_evidence", "Evidence against a worker's honesty, in nats, over all its submissions.", against)
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


def _gauge(name: str, documentation: str, samples: Samples | float) -> Metric:
    return _with(GaugeMetricFamily(f"shoal_{name}", documentation), samples)


def _counter(name: str, documentation: str, samples: Samples | float) -> Metric:
    return _with(CounterMetricFamily(f"shoal_{name}", documentation), samples, "_total")


def _with(metric: Metric, samples: Samples | float, suffix: str = "") -> Metric:
    """Add samples to a metric and return it. `samples`: one number, or several with labels."""
    for labels, value in [({}, samples)] if isinstance(samples, int | float) else samples:
        metric.add_sample(metric.name + suffix, dict(labels), value)
    return metric
