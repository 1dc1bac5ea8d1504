"""What the trusted side reports: versions that were published, steps that were trained, accuracies that were measured.

Invariant: a version has one digest for ever; a report that comes twice, as after a restart, counts once.
Called by the coordinator's routes for origin, learner and evaluator.
"""

import json

from shoal.coordinator.database import Database, PoolError
from shoal.coordinator.history import HistoryLog
from shoal.protocol.messages import Evaluation, Policy, StepReport


class Learning:
    def __init__(self, db: Database, history: HistoryLog) -> None:
        self.db = db
        self.history = history

    def published(self, policy: Policy) -> None:
        """Note a published version. The same one again is fine; another digest for it is not."""
        with self.db.transaction():
            held = self.db.one("SELECT digest FROM policies WHERE version = ?", policy.version)
            if held is not None:
                if held["digest"] != policy.digest:
                    raise PoolError(f"version {policy.version} was published with another digest")
                return
            self.db.change(
                "INSERT INTO policies VALUES (?, ?, ?, ?)",
                policy.version,
                policy.digest,
                policy.size_bytes,
                self.db.clock(),
            )
            self.db.ledger.append("policy", {"version": policy.version, "digest": policy.digest})

    def trained(self, report: StepReport) -> None:
        """Note one step's metrics, with the rewards of all groups accepted while it was open, useless ones included."""
        judged = self.db.one(
            "SELECT avg(reward) AS reward, avg(flat) AS zero_std FROM groups WHERE during = ?", report.step
        )
        seen = {}
        if judged["reward"] is not None:  # none where leftovers of the step before filled this one at once
            seen = {"reward/mean": judged["reward"], "reward/zero_std_frac": judged["zero_std"]}
        metrics = {"step": float(report.step), "time_s": self.db.clock()} | report.metrics | seen
        with self.db.transaction():
            first = self.history.put("step", str(report.step), json.dumps(metrics))
            if first:
                self.db.ledger.append("trained", {"step": report.step, "submissions": sorted(set(report.trained))})

    def evaluated(self, evaluation: Evaluation) -> None:
        with self.db.transaction():
            key = f"{evaluation.version} final" if evaluation.final else str(evaluation.version)
            self.history.put("evaluation", key, evaluation.model_dump_json())
