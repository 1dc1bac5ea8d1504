"""Reports of the trusted roles: published versions, trained steps, measured accuracies.

Invariant: a version keeps its digest; a repeated report, as after a restart, counts once.
Called by the coordinator's routes for origin, learner and evaluator.
"""

import json
import logging

from shoal.config import Config
from shoal.coordinator.jobs.submissions import Submissions
from shoal.coordinator.reports.history import HistoryLog
from shoal.coordinator.reports.step_metrics import judged
from shoal.coordinator.state.database import Database, PoolError
from shoal.ledger.interface import JSON
from shoal.protocol.messages import Evaluation, Policy, StepReport

log = logging.getLogger(__name__)


class Learning:
    def __init__(self, db: Database, config: Config, history: HistoryLog, submissions: Submissions) -> None:
        self.db = db
        self.config = config
        self.history = history
        self.submissions = submissions

    def published(self, policy: Policy) -> None:
        """Record a published version. Raises PoolError if it was published with another digest."""
        with self.db.transaction():
            digest = self.db.policies.digest(policy.version)
            if digest is not None:
                if digest != policy.digest:
                    raise PoolError(f"version {policy.version} was published with another digest")
                return
            self.db.policies.add(policy.version, policy.digest, policy.size_bytes, self.db.clock())
            self.db.ledger.append("policy", {"version": policy.version, "digest": policy.digest})
        log.info(
            "version %d published, %.1f MB, digest %s", policy.version, policy.size_bytes / 1e6, policy.digest[:16]
        )

    def trained(self, report: StepReport) -> None:
        """Record one step's metrics, with those of all groups accepted while it was open, useless ones included."""
        figures = judged(self.db, report.step)
        metrics = {"step": float(report.step), "time_s": self.db.clock()} | report.metrics | figures
        with self.db.transaction():
            is_first = self.history.put("step", str(report.step), json.dumps(metrics))
            if is_first:
                trained: dict[str, JSON] = {
                    "step": report.step,
                    "submissions": sorted(set(report.trained)),
                    "record": report.record,
                }
                self.db.ledger.append("trained", trained)
            if is_first and report.step == self.config.run.steps - 1:
                self.submissions.close()
        if is_first:
            reward = f", mean reward {figures['reward/mean']:.3f}" if figures else ""
            log.info("step %d of %d trained%s", report.step + 1, self.config.run.steps, reward)

    def evaluated(self, evaluation: Evaluation) -> None:
        key = f"{evaluation.version} final" if evaluation.final else str(evaluation.version)
        is_first = self.history.put("evaluation", key, evaluation.model_dump_json())
        if not is_first:
            return
        accuracies = {"greedy": evaluation.greedy, "sampled": evaluation.sampled}
        shown = ", ".join(f"{kind} {value:.3f}" for kind, value in accuracies.items() if value is not None)
        log.info("version %d evaluated on %d held-out tasks: %s", evaluation.version, evaluation.n, shown)
        if evaluation.final and self.db.is_finished(self.config.run.steps):
            log.info("run finished: all %d steps trained, last version evaluated", self.config.run.steps)
