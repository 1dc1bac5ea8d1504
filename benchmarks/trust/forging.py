"""Change a run's ledger and tables as a lying coordinator can, and sign, co-sign and seal the result again.

Validators may co-sign the new heads too. Without their key, the heads that they signed before stay as they are.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.coordinator.pool import TABLE_NAMES
from shoal.ledger.chain import Entry, Head, canonical_json, next_entry, open_head, sign_head
from shoal.ledger.connection import SqliteConnection, table_digest
from shoal.protocol.identity import Identity, Signed

Body = dict[str, Any]


@dataclass
class Ledger:
    """The entries of a finished run, as (kind, body), and its tables. Tests change them."""

    folder: Path
    database: sqlite3.Connection
    entries: list[tuple[str, Body]] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)  # malformed bodies, by index

    def find(self, kind: str, **wanted: object) -> Body:
        bodies = [body for each, body in self.entries if each == kind]
        return next(body for body in bodies if all(body[key] == value for key, value in wanted.items()))

    def index(self, body: Body) -> int:
        return next(at for at, (_, each) in enumerate(self.entries) if each is body)

    def drop(self, *bodies: Body) -> None:
        for body in bodies:
            del self.entries[self.index(body)]

    def add(self, kind: str, body: Body, after: Body | None = None) -> None:
        """Insert an entry after another one; by default just before the seal."""
        self.entries.insert(len(self.entries) - 1 if after is None else self.index(after) + 1, (kind, body))

    def write(self, text: str, body: Body) -> None:
        """Replace a body by a text, which need not be an object."""
        self.texts[self.index(body)] = text

    def change_kind(self, kind: str, body: Body) -> None:
        self.entries[self.index(body)] = kind, body

    def set_node(self, key: Identity, **columns: object) -> None:
        for name, value in columns.items():
            self.database.execute(f"UPDATE nodes SET {name} = ? WHERE key = ?", [value, key.public])


@contextmanager
def forging(folder: Path, coordinator: Identity, validator: Identity | None) -> Iterator[Ledger]:
    """Yield the ledger of a run, then sign, co-sign and seal its changed entries.

    If `validator` is None, the co-signed heads stay as they are.
    """
    database = sqlite3.connect(folder / "coordinator" / "pool.sqlite", isolation_level=None)
    for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        database.execute(f"DROP TRIGGER {name}")
    rows = database.execute("SELECT kind, body, time_s FROM ledger ORDER BY seq").fetchall()
    ledger = Ledger(folder, database, [(kind, json.loads(body)) for kind, body, _ in rows])
    yield ledger
    database.execute("DELETE FROM ledger")
    chain: list[Entry] = []
    heads: list[Signed] = []
    for number, (kind, body) in enumerate(ledger.entries):
        if kind == "witnessed" and validator is not None:
            head = open_head(Signed.model_validate_json(body["head"]), validator.public)
            known = chain[min(head.seq, len(chain)) - 1]
            heads.append(sign_head(Head(run=head.run, seq=known.seq, digest=known.digest), validator))
            body["head"] = heads[-1].model_dump_json()
        if kind == "sealed":
            body["tables"] = {name: table_digest(SqliteConnection(database), name) for name in TABLE_NAMES}
        time_s = rows[min(len(chain), len(rows) - 1)][2]
        text = ledger.texts.get(number) or canonical_json(body)
        chain.append(next_entry(chain[-1] if chain else None, kind, text, time_s, coordinator))
        row = chain[-1].model_dump()
        database.execute(f"INSERT INTO ledger ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", [*row.values()])
    if heads:
        (folder / "validator" / "head.json").write_text(heads[-1].model_dump_json())
    database.close()
