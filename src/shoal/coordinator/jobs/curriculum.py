"""The curriculum's pages: what accepted verdicts say of each task, closed whenever a step opens.

Invariant: the page of a step holds every group accepted before that step opened and not in an earlier page, and nothing
else. The ledger records the scores of each accepted submission and the digest of each page, in this order, so anyone who
has the ledger computes the same pages (`recomputed`): the coordinator chooses nothing.
Called by `submissions` (a batch is full), `assignments` and the routes; `shoal verify` opens a stopped run's pages. How
pages become weights of tasks is in `tasks.curriculum`.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shoal.config import Config
from shoal.coordinator.state.database import Database, PoolError
from shoal.coordinator.state.opening import named_database
from shoal.coordinator.tables.connection import SqliteConnection
from shoal.coordinator.tables.curricula import Curricula
from shoal.ledger.interface import JSON, Entry
from shoal.protocol.messages import CurriculumPage, GroupResult


class Curriculum:
    def __init__(self, db: Database, config: Config) -> None:
        self.db = db
        self.is_used = config.tasks.curriculum == "pass_rate"

    def close(self, step: int) -> None:
        """Make the page of a step that opens now. Part of the caller's transaction."""
        if not self.is_used:
            return
        before, until = self.db.curricula.newest(), self.db.curricula.newest_group()
        page = CurriculumPage(step=step, previous=before.digest, tasks=self.db.curricula.scored(before.until, until))
        self.db.curricula.add(step, page.digest(), page.model_dump_json(), until)
        self.db.ledger.append("curriculum", {"step": step, "page": page.digest()})

    def digest(self, step: int) -> str:
        """Names the page that the tasks of this step are drawn by; "": none."""
        return self.db.curricula.digest(step) if self.is_used else ""

    def page(self, digest: str) -> CurriculumPage:
        return read_page(self.db.curricula, digest)

    def evidence(self, groups: Sequence[GroupResult]) -> dict[str, JSON]:
        """What the ledger's entry of an accepted submission says for the page."""
        if not self.is_used:
            return {}
        return {
            "scores": [
                [group.task, group.outcomes.total, group.score_millionths]
                for group in groups
                if not group.outcomes.grader_error and group.outcomes.total
            ]
        }


def read_page(table: Curricula, digest: str) -> CurriculumPage:
    """Raises PoolError."""
    body = table.body(digest)
    if body is None:
        raise PoolError(f"no curriculum page {digest[:64]}", 404)
    return CurriculumPage.model_validate_json(body)


def open_pages(folder: Path) -> Curricula:
    """The pages of the coordinator that uses this folder, to read. Raises PoolError, ConfigError, DatabaseLostError."""
    path = folder / "pool.sqlite"
    if not path.is_file() and (database := named_database(folder)):
        from shoal.coordinator.tables.postgres import open_postgres

        return Curricula(open_postgres(database))
    try:
        return Curricula(SqliteConnection(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)))
    except sqlite3.OperationalError as error:
        raise PoolError(f"{path} cannot be read ({error}); name the folder of the run with --run") from error


def recomputed(entries: Iterable[Entry]) -> Iterator[tuple[CurriculumPage, str]]:
    """Each page as a ledger's accepted submissions give it, and the digest that the coordinator recorded for it."""
    rollouts: Counter[int] = Counter()
    scores: Counter[int] = Counter()
    previous = ""
    for entry in entries:
        if entry.kind == "accepted":
            for task, number, score in json.loads(entry.body).get("scores", []):
                rollouts[task] += number
                scores[task] += score
        elif entry.kind == "curriculum":
            body = json.loads(entry.body)
            tasks = [(task, rollouts[task], scores[task]) for task in sorted(rollouts)]
            page = CurriculumPage(step=body["step"], previous=previous, tasks=tasks)
            yield page, body["page"]
            previous = page.digest()
            rollouts.clear()
            scores.clear()
