"""The current state of the run: what `/v1/status` answers.

Invariant: it changes nothing, and its size does not grow with the run's length. Called by the coordinator's open route.
"""

from collections.abc import Sequence
from dataclasses import asdict

from shoal.config import Config
from shoal.coordinator.standing.suspension import left_s
from shoal.coordinator.state.database import Database
from shoal.coordinator.trust.checking import most_unchecked
from shoal.protocol.messages import Capability, Exactness, Grading, NodeStatus, Signal, Stats, Status

RECENT_ROLLOUTS = 512  # grader errors are counted among these


def read_status(db: Database, config: Config, run: str, notices: Sequence[str]) -> Status:
    nodes = _nodes(db)
    totals = db.groups.totals()
    return Status(
        run=run,
        state="finished" if db.is_finished(config.run.steps) else "running",
        step=db.open_step(),
        steps=config.run.steps,
        have=db.groups.count_waiting(most_unchecked=most_unchecked(config)),
        need=config.coordinator.prompts_per_step,
        newest_version=db.policies.newest(),
        started_s=db.run.started_s(),
        now_s=db.clock(),
        nodes=nodes,
        trained=db.history.count("step"),
        notices=list(notices),
        reject_reasons=db.submissions.count_by_reason(),
        slashed=[node.name for node in nodes if node.evicted],
        stale_groups=totals.stale,
        late_groups=db.submissions.groups_too_late(),
        useful_groups=totals.useful,
        tokens_generated=totals.tokens,
        signal=Signal(**asdict(db.groups.signal(db.open_step()))),
        exact=Exactness(**dict(zip(Exactness.model_fields, db.replays.totals(), strict=True))),
        grading=_grading(db, -(-RECENT_ROLLOUTS // config.sampling.group_size)),
    )


def _grading(db: Database, groups: int) -> Grading:
    recent, errors = db.grades.recent(groups)
    return Grading(total=db.grades.total(), recent=recent, errors=errors, error=db.grades.newest_error())


def _nodes(db: Database) -> list[NodeStatus]:
    credit = db.credits.tokens_by_credit()
    counts, missed = db.submissions.count_by_worker_and_state(), db.submissions.count_missed()
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
            suspended_s=left_s(node, db.clock()),
            suspension=node.reason if left_s(node, db.clock()) else "",
            accepted=counts.get((node.key, "accepted"), 0),
            rejected=counts.get((node.key, "rejected"), 0),
            missed=missed.get(node.key, 0),
            stats=Stats.model_validate_json(node.stats),
            credited=credit.get((node.key, "credited"), 0),
            pending=credit.get((node.key, "pending"), 0),
            evidence=db.evidence.of(node.key).evidence,
            tokens_per_s=node.tokens_per_s,
            size=node.size,
            capability=Capability.model_validate_json(node.capability),
            fingerprint=next(iter(db.fingerprints.of(node.key).values()), ""),
        )
        for node in db.nodes.all()
    ]
