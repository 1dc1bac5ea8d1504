"""What readers of the run fetch incrementally: metrics of trained steps, evaluations, sample completions.

Invariant: a reader that asks with the last cursor it got misses nothing and gets nothing twice. Only the newest samples are
kept. A page is made of the entries as they are stored, and bounded in bytes: anyone may ask for one.
Called by `learning` and `submissions`, which report, and by the coordinator's open route.
"""

import json
from collections.abc import Iterator

from shoal.coordinator.state.database import Database
from shoal.coordinator.tables.history import Kind
from shoal.protocol.history import MAX_SAMPLES
from shoal.protocol.messages import Evaluation, History, WorkerSample

PAGE_BYTES = 256 << 10  # of entries in one answer; a larger entry comes alone
OWN_BYTES = 4 << 20  # likewise, of what this process itself reads: its record is written again with each page
READ = 32  # entries, at once


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
        """The next entries after `cursor`, for this process itself; 0 is before the first."""
        return History.model_validate_json(self.page(cursor, OWN_BYTES))

    def page(self, cursor: int, most_bytes: int = PAGE_BYTES) -> bytes:
        """The next entries after `cursor`, as the JSON of a `History`."""
        bodies: dict[Kind, list[str]] = {"step": [], "evaluation": [], "sample": []}
        size_bytes = 0
        for seq, kind, body in self._rows_after(cursor):
            length = len(body.encode())
            if size_bytes and size_bytes + length > most_bytes:
                break
            bodies[kind].append(body)
            size_bytes, cursor = size_bytes + length, seq
        metrics, evaluations, samples = (",".join(bodies[kind]) for kind in ("step", "evaluation", "sample"))
        text = f'{{"cursor":{cursor},"metrics":[{metrics}],"evaluations":[{evaluations}],"samples":[{samples}]}}'
        return text.encode()

    def _rows_after(self, cursor: int) -> Iterator[tuple[int, Kind, str]]:
        while rows := self.db.history.after(cursor, READ):
            yield from rows
            cursor = rows[-1][0]

    def newest_step(self) -> dict[str, float] | None:
        """Metrics of the step that was reported last."""
        body = self.db.history.newest("step")
        return None if body is None else json.loads(body)

    def newest_evaluation(self) -> Evaluation | None:
        body = self.db.history.newest("evaluation")
        return None if body is None else Evaluation.model_validate_json(body)
