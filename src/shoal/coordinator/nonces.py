"""Remembers which nonces were used, so that no signed request is served twice.

Invariant: a nonce that was spent is refused for ever, over restarts and clocks that jump back too. Called by `routes`.
"""

import sqlite3

from shoal.protocol.signing import MAX_AGE_S


class SqliteNonces:
    """A NonceStore in SQLite, which survives restarts.

    A nonce is forgotten only when it is older than the newest one by more than keep_s, and from then on
    everything that old is refused: no setting and no clock that jumps back can reopen a used nonce. keep_s
    must be at least twice the max_age_s of `verify_request`, or slow requests are refused. Give it a
    connection without an open transaction: a rollback would unspend the nonce.
    """

    def __init__(self, connection: sqlite3.Connection, *, keep_s: int = 2 * MAX_AGE_S) -> None:
        if connection.isolation_level is not None:
            raise ValueError("open the connection with isolation_level=None, or spent nonces may be lost")
        self._connection = connection
        self._keep_s = keep_s
        connection.execute(
            "CREATE TABLE IF NOT EXISTS nonces (key TEXT NOT NULL, nonce TEXT NOT NULL,"
            " created_s INTEGER NOT NULL, PRIMARY KEY (key, nonce)) WITHOUT ROWID"
        )
        connection.execute("CREATE INDEX IF NOT EXISTS nonces_by_age ON nonces (created_s)")

    def spend(self, key: str, nonce: str, created_s: int) -> bool:
        # One statement, so that another process cannot purge between the check and the record.
        spent = self._connection.execute(
            "INSERT OR IGNORE INTO nonces SELECT :key, :nonce, :created_s"
            " WHERE :created_s >= coalesce((SELECT max(created_s) FROM nonces) - :keep_s, :created_s)",
            {"key": key, "nonce": nonce, "created_s": created_s, "keep_s": self._keep_s},
        )
        if spent.rowcount != 1:
            return False
        self._connection.execute(
            "DELETE FROM nonces WHERE created_s < (SELECT max(created_s) FROM nonces) - ?", (self._keep_s,)
        )
        return True
