"""The table of what the tests over all of a worker's submissions hold so far.

Invariant: one row per worker, changed in the transaction that judges the submission, so no submission counts twice and none
is forgotten by a restart. Called by `spending` and `status`.
"""

import json

from shoal.coordinator.tables.connection import Connection
from shoal.evidence.process import Process

SCHEMA = [
    """CREATE TABLE IF NOT EXISTS evidence (
    worker TEXT PRIMARY KEY, observations BIGINT NOT NULL, money TEXT NOT NULL, dismissed BOOLEAN NOT NULL DEFAULT FALSE)"""
]


class EvidenceTable:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def of(self, worker: str) -> Process:
        row = self.connection.row("SELECT observations, money FROM evidence WHERE worker = ?", worker)
        return Process() if row is None else Process(row[0], json.loads(row[1]))

    def put(self, worker: str, process: Process) -> None:
        self.connection.change(
            "INSERT INTO evidence (worker, observations, money) SELECT ?, 0, '{}'"
            " WHERE NOT EXISTS (SELECT 1 FROM evidence WHERE worker = ?)",
            worker,
            worker,
        )
        self.connection.change(
            "UPDATE evidence SET observations = ?, money = ? WHERE worker = ?",
            process.observations,
            json.dumps(dict(process.money)),
            worker,
        )

    def dismiss(self, worker: str) -> bool:
        """False if it was dismissed before."""
        return (
            self.connection.change("UPDATE evidence SET dismissed = TRUE WHERE worker = ? AND NOT dismissed", worker)
            == 1
        )

    def forget(self, worker: str) -> None:
        """The worker starts again, as if nothing had been submitted."""
        self.connection.change("DELETE FROM evidence WHERE worker = ?", worker)

    def is_dismissed(self, worker: str) -> bool:
        return bool(self.connection.value("SELECT dismissed FROM evidence WHERE worker = ?", worker))
