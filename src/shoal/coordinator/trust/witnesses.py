"""The ledger for those who watch it: its entries after a cursor, and the heads that validators co-sign.

Invariant: a co-signature is recorded only for an entry that this ledger holds, by the key that signed it. Whoever has a
co-signed head notices if the ledger is cut off before it, or was written again.
Called by the coordinator's routes.
"""

from shoal.coordinator.state.database import Database, PoolError
from shoal.ledger.head import Head, open_head
from shoal.ledger.interface import LedgerError
from shoal.ledger.table import read_lines
from shoal.protocol.identity import Signed

PAGE_BYTES = 256 << 10  # of entries in one answer; a larger entry comes alone


class Witnesses:
    def __init__(self, db: Database, run: str) -> None:
        self.db = db
        self.run = run

    def entries(self, after: int) -> bytes:
        """Entries with seq > after, oldest first, as JSON lines; empty if there are none."""
        page = bytearray()
        connection = self.db.connection  # the ledger is a table beside the others
        for line in read_lines(lambda sql, arguments: connection.rows(sql, *arguments), after):
            if page and len(page) + len(line) > PAGE_BYTES:
                break
            page += line
        return bytes(page)

    def witnessed(self, key: str, signed: Signed) -> None:
        """Record a validator's head. Raises PoolError unless it is one of this ledger, signed by `key`."""
        try:
            head = open_head(signed, key)
        except LedgerError as error:
            raise PoolError(str(error), 400) from error
        entry = next(iter(self.db.ledger.entries(since=head.seq - 1)), None)
        if head != (entry and Head(run=self.run, seq=entry.seq, digest=entry.digest)):
            raise PoolError(f"entry {head.seq} of this ledger is another one", 409)
        self.db.ledger.append("witnessed", {"validator": key, "head": signed.model_dump_json()})
