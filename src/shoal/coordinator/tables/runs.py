"""The table with one row: when the run started. Called by `database` and `status`."""

from shoal.coordinator.tables.connection import Connection

SCHEMA = ["CREATE TABLE IF NOT EXISTS run (started_s DOUBLE PRECISION NOT NULL)"]


class Run:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def start(self, now_s: float) -> None:
        """Store the start of a new run; a run that has started keeps its own."""
        self.connection.change("INSERT INTO run (started_s) SELECT ? WHERE NOT EXISTS (SELECT 1 FROM run)", now_s)

    def started_s(self) -> float:
        return float(self.connection.value("SELECT started_s FROM run"))
