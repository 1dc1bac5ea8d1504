"""What a reader of the run asks for bit by bit: metrics of trained steps, evaluations, sample completions.

Invariant: every entry, a replaced one too, has a higher sequence number than all before it, so a reader that asks with the
last cursor it got misses nothing and gets nothing twice. Of the samples only the newest are kept.
Called by the parts of the pool that report, and by the coordinator's open route.
"""

import json
from typing import Literal

from shoal.coordinator.database import Database
from shoal.protocol.history import MAX_SAMPLES
from shoal.protocol.messages import Evaluation, History, WorkerSample

PAGE = 1_000  # entries in one answer

Kind = Literal["step", "evaluation", "sample"]


class HistoryLog:
    def __init__(self, db: Database) -> None:
        self.db = db

    def put(self, kind: Kind, key: str, body: str) -> bool:
        """Append an entry, in place of an earlier one of this kind and key. Returns whether it is the first of its key."""
        with self.db.transaction():
            before = self.db.one("SELECT 1 FROM history WHERE kind = ? AND key = ?", kind, key)
            self.db.change("DELETE FROM history WHERE kind = ? AND key = ?", kind, key)
            self.db.change("INSERT INTO history (kind, key, body) VALUES (?, ?, ?)", kind, key, body)
        return before is None

    def put_samples(self, samples: list[WorkerSample]) -> None:
        """Append sample completions, and drop the oldest beyond what is kept."""
        with self.db.transaction():
            for sample in samples:
                self.put("sample", f"{sample.submission}/{sample.group}", sample.model_dump_json())
            self.db.change(
                "DELETE FROM history WHERE kind = 'sample' AND seq <="
                " (SELECT seq FROM history WHERE kind = 'sample' ORDER BY seq DESC LIMIT 1 OFFSET ?)",
                MAX_SAMPLES,
            )

    def after(self, cursor: int) -> History:
        """The next entries after `cursor`, at most PAGE; 0 is before the first."""
        rows = self.db.all("SELECT * FROM history WHERE seq > ? ORDER BY seq LIMIT ?", cursor, PAGE)
        bodies = {
            kind: [row["body"] for row in rows if row["kind"] == kind] for kind in ("step", "evaluation", "sample")
        }
        return History(
            cursor=rows[-1]["seq"] if rows else cursor,
            metrics=[json.loads(body) for body in bodies["step"]],
            evaluations=[Evaluation.model_validate_json(body) for body in bodies["evaluation"]],
            samples=[WorkerSample.model_validate_json(body) for body in bodies["sample"]],
        )
