"""Handing out work: which task a worker gets next, or what it has to wait for.

Invariant: a worker has at most one open task, and neither restarting nor going back to older weights gives it another.
And no more is handed out than the open batch still needs, so queues stay short and rollouts young.
Called by `members` with a worker's heartbeat. Which problems and seeds a task stands for is derived from it
(`tasks.derive`), not chosen here. Left out: faster workers getting more.
"""

import sqlite3

from shoal.config import Config
from shoal.coordinator.database import Database
from shoal.protocol.messages import Assignment

RECENT_GROUPS = 200  # of which the share of useful ones is estimated
LEAST_USEFUL_SHARE = 0.05  # assumed even where hardly any group is useful, so that queues stay bounded


class Assignments:
    def __init__(self, db: Database, config: Config) -> None:
        self.db = db
        self.config = config

    def assign(self, worker: str, loaded: int | None) -> Assignment | str:
        """The next task of a worker that has loaded this version, or what it has to wait for."""
        with self.db.transaction():
            now_s = self.db.clock()
            self.db.change("UPDATE submissions SET state = 'expired' WHERE state = 'open' AND deadline_s < ?", now_s)
            step, newest = self.db.open_step(), self.db.newest()
            oldest_allowed = step - self.config.coordinator.async_level
            if step >= self.config.run.steps:
                return "the run's last steps to be trained: every batch is full"
            if newest is None or newest < oldest_allowed:
                return f"the learner to publish version {max(oldest_allowed, 0)}"
            if loaded is None or loaded < oldest_allowed:
                return f"this worker to load version {newest}"
            policy = self.db.one("SELECT * FROM policies WHERE version = ?", loaded)
            if policy is None:
                return f"version {loaded}, which this worker says it has, to be published"
            mine = self.db.one("SELECT * FROM submissions WHERE worker = ? AND state = 'open'", worker)
            if mine is not None and mine["version"] == loaded:
                return as_assignment(mine, self.config)  # it restarted: the same again, so that this chooses nothing
            if mine is not None and loaded < mine["version"]:
                return f"this worker to load version {mine['version']}"  # going back and forth would choose tasks
            if mine is not None:
                self.db.change("UPDATE submissions SET state = 'expired' WHERE id = ?", mine["id"])
            if self._enough_under_way():
                return "the validators and the learner to catch up"
            return self._open(worker, step, loaded, policy["digest"], now_s)

    def _open(self, worker: str, step: int, version: int, digest: str, now_s: float) -> Assignment:
        """A new task with this worker's next number."""
        last = self.db.one("SELECT max(number) AS number FROM submissions WHERE worker = ?", worker)["number"]
        number = 0 if last is None else last + 1
        id, deadline_s = f"{worker[:16]}-{number:06d}", now_s + self.config.coordinator.task_deadline_s
        self.db.change(
            "INSERT INTO submissions (id, worker, number, step, version, digest, deadline_s, state)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, 'open')",
            id,
            worker,
            number,
            step,
            version,
            digest,
            deadline_s,
        )
        return as_assignment(self.db.one("SELECT * FROM submissions WHERE seq = last_insert_rowid()"), self.config)

    def _enough_under_way(self) -> bool:
        """Whether what is handed out and not yet judged will, at the recent share of useful groups, fill the open batch:
        more would only grow old in the queue. The task of a worker that has gone silent is not counted on."""
        under_way = self.db.one(
            "SELECT count(*) AS n FROM submissions JOIN nodes ON key = worker"
            " WHERE state IN ('uploaded', 'validating') OR (state = 'open' AND seen_s >= ?)",
            self.db.clock() - self.config.coordinator.node_timeout_s,
        )
        recent = self.db.one(
            "SELECT avg(useful) AS share FROM (SELECT useful FROM groups ORDER BY seq DESC LIMIT ?)", RECENT_GROUPS
        )["share"]
        share = max(1.0 if recent is None else recent, LEAST_USEFUL_SHARE)
        expected = self.db.waiting() + share * under_way["n"] * self.config.workers.groups_per_submission
        return bool(expected >= self.config.coordinator.prompts_per_step)


def as_assignment(row: sqlite3.Row, config: Config) -> Assignment:
    """A row of the submissions, as its worker and its validator are told of it."""
    return Assignment(
        id=row["id"],
        number=row["number"],
        step=row["step"],
        policy_version=row["version"],
        policy_digest=row["digest"],
        groups=config.workers.groups_per_submission,
        deadline_s=row["deadline_s"],
        upload_path=f"/v1/submissions/{row['id']}",
        max_bytes=config.coordinator.max_submission_bytes,
    )
