"""The pool's state: one part for each thing that members do, all over one database.

    members      who is here                          judgement   who checks what, verdicts, and what follows
    assignments  who does what next                   learning    what learner, origin and evaluator report
    batches      what the learner trains on

Invariants: each public method of a part is one transaction, ledger entries included; if one part calls another, both are in
it. A co-signature is recorded only for an entry that this ledger holds, by the key that signed it: whoever has a co-signed
head notices if the ledger is cut off before it, or was written again.
"""

import random
from collections import deque
from collections.abc import Callable

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

MAX_NOTICES = 20  # the newest are shown
PAGE_BYTES = 256 << 10  # of the ledger's entries in one answer; a larger entry comes alone
SCHEMA = [*database.SCHEMA, *checkers.SCHEMA, *trust.SCHEMA]
TABLE_NAMES = table_names(SCHEMA)  # that are sealed


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
        """`secret`: what the assignments' nonces are made with (`assignment.nonce_secret`). `stakes`: None: those that the
        operator books in the ledger."""
        self.config, self.run = config, run
        self.notices: deque[str] = deque(maxlen=MAX_NOTICES)
        self.db = db = Database(connection, ledger, clock)
        db.create([*SCHEMA, *members.DOWNLOADS])
        arrivals = Arrivals(db, config)
        self.assignments = Assignments(db, config, arrivals, run=run, secret=secret)
        checking = checkers.Checkers(db, config, self.notices.append)
        self.members = members.Members(db, config, self.assignments, checking, stakes or BookedStakes(db))
        self.batches = Batches(db, config)
        escrow = Escrow(db, config)
        trusting = trust.Trust(db, config, escrow, random.SystemRandom().random)
        describe = self.assignments.describe
        self.judgement = Judgement(db, config, describe, arrivals, self.batches, checking, trusting, escrow)
        self.learning = Learning(db, config, self.judgement.close)

    def ledger_page(self, after: int) -> bytes:
        """Entries with seq > after, oldest first, as JSON lines; empty if there are none."""
        page = bytearray()
        for line in self.db.ledger.lines(after):
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
