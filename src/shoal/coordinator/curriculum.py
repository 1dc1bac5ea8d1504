"""The curriculum's pages: what accepted verdicts say of each task, closed whenever a step opens.

Invariants: the page of a step holds every group accepted before that step opened and not in an earlier page, and nothing
else. A page never changes. The ledger records the scores of each accepted submission and the digest of each page, in this
order, so anyone who has the ledger computes the same pages (`recomputed`): the coordinator chooses nothing.
How pages become weights of tasks is in `tasks.curriculum`.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shoal.config import Config
from shoal.coordinator.database import Database, PoolError
from shoal.coordinator.groups import ROLLOUTS
from shoal.coordinator.state.folder import open_tables
from shoal.ledger.chain import JSON, Entry
from shoal.ledger.connection import Connection
from shoal.protocol.messages import CurriculumPage, GroupResult

SCHEMA = [
    """CREATE TABLE IF NOT EXISTS curricula (
    step BIGINT PRIMARY KEY, digest TEXT UNIQUE NOT NULL, body TEXT NOT NULL, until BIGINT NOT NULL)"""
]


class Curricula:
    """The pages, by the step that opened when each was closed."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def add(self, page: CurriculumPage, until: int = 0) -> None:
        """`until`: the newest group that it or an earlier page covers."""
        self.connection.change(
            "INSERT INTO curricula (step, digest, body, until) VALUES (?, ?, ?, ?)",
            *(page.step, page.digest(), page.model_dump_json(), until),
        )

    def close(self, step: int) -> CurriculumPage:
        """The page of a step that opens now: all groups since the page before. Those with a grader error say nothing."""
        newest = self.connection.row("SELECT digest, until FROM curricula ORDER BY step DESC LIMIT 1")
        previous, after = newest or ("", 0)
        until = int(self.connection.value("SELECT coalesce(max(seq), 0) FROM groups"))
        tasks = self.connection.rows(
            f"SELECT task, sum({ROLLOUTS}), sum(score) FROM groups WHERE seq > ? AND seq <= ? AND grader_error = 0"
            f" AND {ROLLOUTS} > 0 GROUP BY task ORDER BY task",
            *(after, until),
        )
        page = CurriculumPage(step=step, previous=previous, tasks=tasks)
        self.add(page, until)
        return page

    def digest(self, step: int) -> str:
        """Of the newest page that was there when `step` opened; "" if there was none."""
        found: str | None = self.connection.value(
            "SELECT digest FROM curricula WHERE step <= ? ORDER BY step DESC LIMIT 1", step
        )
        return found or ""

    def page(self, digest: str) -> CurriculumPage:
        """Raises PoolError."""
        body = self.connection.value("SELECT body FROM curricula WHERE digest = ?", digest)
        if body is None:
            raise PoolError(f"no curriculum page {digest[:64]}", 404)
        return CurriculumPage.model_validate_json(body)


class Curriculum:
    def __init__(self, db: Database, config: Config) -> None:
        self.db, self.pages = db, Curricula(db.connection)
        self.is_used = config.tasks.curriculum == "pass_rate"

    def close(self, step: int) -> None:
        """Make the page of a step that opens now. Part of the caller's transaction."""
        if self.is_used:
            self.db.ledger.append("curriculum", {"step": step, "page": self.pages.close(step).digest()})

    def digest(self, step: int) -> str:
        """Names the page that the tasks of this step are drawn by; "": none."""
        return self.pages.digest(step) if self.is_used else ""


def evidence(groups: Sequence[GroupResult], config: Config) -> dict[str, JSON]:
    """What the ledger's entry of an accepted submission says for the page."""
    if config.tasks.curriculum != "pass_rate":
        return {}
    return {
        "scores": [
            [group.task, group.outcomes.total, group.score_millionths]
            for group in groups
            if not group.outcomes.grader_error and group.outcomes.total
        ]
    }


def open_pages(folder: Path) -> Curricula:
    """The pages of the coordinator that uses this folder, to read. Raises FolderError, ConfigError, DatabaseLostError."""
    return Curricula(open_tables(folder, read_only=True))


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
