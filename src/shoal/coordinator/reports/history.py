"""What readers of the run fetch incrementally: metrics of trained steps, evaluations, sample completions.

Invariant: a reader that asks with the last cursor it got misses nothing and gets nothing twice. Only the newest samples are
kept.
Called by `learning` and `submissions`, which report, and by the coordinator's open route.
"""

import json

from shoal.coordinator.state.database import Database
from shoal.coordinator.tables.history import Kind
from shoal.protocol.history import MAX_SAMPLES
from shoal.protocol.messages import Evaluation, History, WorkerSample

PAGE = 1_000  # entries in one answer


class HistoryLog:
    def __init__(self, db: Database) -> None:
        self.db = db

    def put(self, kind: Kind, key: str, body: str) -> bool:
        """Append an entry; it replaces an earlier one of the same kind and key. True if there was none."""
        with self.db.transaction():
            return self.db.history.put(kind, key, body)

    def put_samples(self, samples: list[WorkerSample]) -> None:
        """Append sample completions, and drop the oldest beyond the limit."""
        with self.db.transaction():
            for sample in samples:
                self.put("sample", f"{sample.submission}/{sample.group}", sample.model_dump_json())
            self.db.history.keep_newest("sample", MAX_SAMPLES)

    def after(self, cursor: int) -> History:
        """The next entries after `cursor`, at most PAGE; 0 is before the first."""
        rows = self.db.history.after(cursor, PAGE)
        bodies: dict[Kind, list[str]] = {"step": [], "evaluation": [], "sample": []}
        for _, kind, body in rows:
            bodies[kind].append(body)
        return History(
            cursor=rows[-1][0] if rows else cursor,
            metrics=[json.loads(body) for body in bodies["step"]],
            evaluations=[Evaluation.model_validate_json(body) for body in bodies["evaluation"]],
            samples=[WorkerSample.model_validate_json(body) for body in bodies["sample"]],
        )

    def newest_step(self) -> dict[str, float] | None:
        """Metrics of the step that was reported last."""
        body = self.db.history.newest("step")
        return None if body is None else json.loads(body)

    def newest_evaluation(self) -> Evaluation | None:
        body = self.db.history.newest("evaluation")
        return None if body is None else Evaluation.model_validate_json(body)
