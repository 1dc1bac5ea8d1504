"""The pool: one part per kind of request, all on one database.

    members      registration and heartbeats          judgement   claims, verdicts and their consequences
    assignments  which task a worker gets next        learning    reports by learner, origin and evaluator
    batches      what the learner trains on

Invariants: each public method of a part is one transaction, ledger entries included. If one part calls another, both
share the transaction. A co-signed head is recorded only if this ledger contains it and the sender signed it. Anyone
with a co-signed head notices if the ledger is truncated or rewritten.
"""

import random
from collections import deque
from collections.abc import Callable
from itertools import takewhile

from shoal.config import Config
from shoal.coordinator import checkers, database, members, trust
from shoal.coordinator.arrivals import Arrivals
from shoal.coordinator.assignment import Assignments
from shoal.coordinator.batches import Batches, Learning
from shoal.coordinator.credit import BookedStakes, Escrow, StakeView
from shoal.coordinator.database import Database, PoolError
from shoal.coordinator.judgement import Judgement
from shoal.ledger.chain import Head, LedgerError, open_head
from shoal.ledger.connection import Connection, table_names
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Signed

MAX_NOTICES = 20
PAGE_BYTES = 256 << 10  # limit on the total size of a response's entries; an entry above the limit is sent alone
SCHEMA = [*database.SCHEMA, *checkers.SCHEMA, *trust.SCHEMA]
TABLE_NAMES = table_names(SCHEMA)  # covered by the seal


class Pool:
    def __init__(
        self,
        connection: Connection,
        ledger: Ledger,
        config: Config,
        run: str,
        clock: Callable[[], float],
        *,
        secret: bytes,
        stakes: StakeView | None = None,
    ) -> None:
        """`secret`: the key for assignment nonces (`assignment.nonce_secret`). `stakes` defaults to the stakes
        that the operator books in the ledger."""
        self.config, self.run = config, run
        self.notices: deque[str] = deque(maxlen=MAX_NOTICES)
        self._witnessed: dict[str, int] = {}  # the newest head that each validator co-signed since the start
        self.db = db = Database(connection, ledger, clock)
        db.create([*SCHEMA, *members.DOWNLOADS])
        arrivals = Arrivals(db, config)
        self.assignments = Assignments(db, config, arrivals, run=run, secret=secret)
        self.checkers = checkers.Checkers(db, config, self.notices.append)
        self.members = members.Members(db, config, self.assignments, self.checkers, stakes or BookedStakes(db))
        self.batches = Batches(db, config)
        escrow = Escrow(db, config)
        self.trust = trust.Trust(db, config, escrow, random.SystemRandom().random)
        describe = self.assignments.describe
        self.judgement = Judgement(db, config, run, describe, arrivals, self.batches, self.checkers, self.trust, escrow)
        self.learning = Learning(db, config, self.judgement.close)

    def ledger_page(self, after: int) -> bytes:
        """Return entries with seq > `after`, oldest first, as JSON lines; empty if there are none."""
        page = bytearray()
        for line in self.db.ledger.lines(after):
            if page and len(page) + len(line) > PAGE_BYTES:
                break
            page += line
        return bytes(page)

    def record_head(self, key: str, signed: Signed) -> None:
        """Record a validator's co-signed head, unless it or only co-signatures were recorded since its last one.

        Raise PoolError unless `key` signed the head and this ledger contains it.
        """
        try:
            head = open_head(signed, key)
        except LedgerError as error:
            raise PoolError(str(error), 400) from error
        entry = next(iter(self.db.ledger.entries(since=head.seq - 1)), None)
        if head != (entry and Head(run=self.run, seq=entry.seq, digest=entry.digest)):
            raise PoolError(f"entry {head.seq} of this ledger differs from the co-signed head", 409)
        entries = self.db.ledger.entries(since=self._witnessed.get(key, 0))
        if any(entry.kind != "witnessed" for entry in takewhile(lambda entry: entry.seq <= head.seq, entries)):
            self.db.ledger.append("witnessed", {"validator": key, "head": signed.model_dump_json()})
            self._witnessed[key] = head.seq
