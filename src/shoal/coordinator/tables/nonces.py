"""The table of used nonces, in a database of its own, so that no signed request is served twice.

Invariant: a spent nonce stays refused, also after a restart and when the clock jumps back. Called by `admission`.
"""

from shoal.coordinator.tables.connection import Connection
from shoal.protocol.signing import MAX_AGE_S

SCHEMA = [
    "CREATE TABLE IF NOT EXISTS nonces (key TEXT NOT NULL, nonce TEXT NOT NULL, created_s BIGINT NOT NULL,"
    " PRIMARY KEY (key, nonce))",
    "CREATE INDEX IF NOT EXISTS nonces_by_age ON nonces (created_s)",
]


class Nonces:
    """A `signing.NonceStore` that survives restarts.

    It forgets a nonce only when a newer one is more than keep_s younger. From then on it refuses everything that old, so
    neither a setting nor a clock that jumps back can reopen a used nonce. keep_s must be at least twice the max_age_s of
    `verify_head`, or slow requests are refused. Do not spend inside an open transaction: a rollback would undo it.
    """

    def __init__(self, connection: Connection, *, keep_s: int = 2 * MAX_AGE_S) -> None:
        self.connection = connection
        self._keep_s = keep_s
        for statement in SCHEMA:
            connection.change(statement)

    def spend(self, key: str, nonce: str, created_s: int) -> bool:
        # One statement, so that another process cannot purge between the check and the insert.
        spent = self.connection.change(
            "INSERT INTO nonces (key, nonce, created_s) SELECT ?, ?, ?"
            " WHERE ? >= coalesce((SELECT max(created_s) FROM nonces) - ?, ?) ON CONFLICT (key, nonce) DO NOTHING",
            key,
            nonce,
            created_s,
            created_s,
            self._keep_s,
            created_s,
        )
        if spent != 1:
            return False
        self.connection.change(
            "DELETE FROM nonces WHERE created_s < (SELECT max(created_s) FROM nonces) - ?", self._keep_s
        )
        return True
