"""The digest of a table's whole content, whatever the order of its rows and the database that holds it.

Invariant: two tables with the same rows have the same digest; any changed, missing, added or doubled row gives another one.
Called by `database` and `seal`, and by the audit, which computes the digests again.
"""

import json
import re
from collections.abc import Iterable

from blake3 import blake3

from shoal.coordinator.tables.connection import Connection


def table_names(schema: Iterable[str]) -> list[str]:
    """The tables that these statements create."""
    return [name for statement in schema for name in re.findall(r"CREATE TABLE IF NOT EXISTS (\w+)", statement)]


def table_digest(connection: Connection, table: str) -> str:
    """BLAKE3, hex, of the sorted digests of the rows. A truth value counts as 0 or 1, as SQLite stores it."""
    rows = connection.rows(f"SELECT * FROM {table}")
    digest = blake3(table.encode())
    for row in sorted(blake3(_text(row)).digest() for row in rows):
        digest.update(row)
    return digest.hexdigest()


def _text(row: tuple[object, ...]) -> bytes:
    plain = [int(value) if isinstance(value, bool) else value for value in row]
    return json.dumps(plain, separators=(",", ":")).encode()
