"""The pool's state: one part for each thing that members do, all over one database.

Invariant: each public method of a part is one transaction, ledger entries included; if one part calls another, both are in
it. Called by the coordinator's routes, which use the parts (`pool.members.register(...)`).
"""

import random
from collections import deque
from collections.abc import Callable

from shoal.config import Config
from shoal.coordinator.credit.escrow import Escrow
from shoal.coordinator.credit.stakes import BookedStakes, StakeView
from shoal.coordinator.jobs.arrivals import Arrivals
from shoal.coordinator.jobs.assignments import Assignments
from shoal.coordinator.jobs.batches import Batches
from shoal.coordinator.jobs.curriculum import Curriculum
from shoal.coordinator.jobs.fitness import Fitness
from shoal.coordinator.jobs.learning import Learning
from shoal.coordinator.jobs.submissions import Submissions
from shoal.coordinator.membership.members import Members
from shoal.coordinator.reports.history import HistoryLog
from shoal.coordinator.reports.metrics import read_metrics
from shoal.coordinator.reports.status import read_status
from shoal.coordinator.state.database import Database
from shoal.coordinator.tables.connection import Connection
from shoal.coordinator.trust.checking import Trust
from shoal.coordinator.trust.classes import Classes
from shoal.coordinator.trust.doubts import Doubts
from shoal.coordinator.trust.spending import Spending
from shoal.coordinator.trust.witnesses import Witnesses
from shoal.ledger.interface import Ledger
from shoal.protocol.messages import Status

MAX_NOTICES = 20  # the newest are shown


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
        """`secret`: what the assignments' nonces are made with (`nonces.nonce_secret`). `stakes`: None: those that the
        operator books in the ledger."""
        self.config = config
        self.run = run
        self.db = Database(connection, ledger, clock)
        self.curriculum = Curriculum(self.db, config)
        arrivals = Arrivals(self.db, config)
        assignments = Assignments(self.db, config, self.curriculum, arrivals, run=run, secret=secret)
        classes = Classes(self.db, config)
        self.members = Members(self.db, config, assignments, classes, stakes or BookedStakes(self.db))
        self.batches = Batches(self.db, config)
        trust = Trust(self.db, config, random.SystemRandom().random)
        self.history = HistoryLog(self.db)
        self.notices: deque[str] = deque(maxlen=MAX_NOTICES)
        doubts = Doubts(self.db, classes, self.notices.append)
        escrow = Escrow(self.db, config)
        self.submissions = Submissions(
            self.db,
            config,
            assignments,
            self.batches,
            trust,
            self.history,
            classes,
            doubts,
            Spending(self.db, config),
            escrow,
            Fitness(self.db, config),
        )
        self.witnesses = Witnesses(self.db, run)
        self.learning = Learning(self.db, config, self.history, self.submissions)

    def status(self) -> Status:
        return read_status(self.db, self.config, self.run, self.notices)

    def metrics(self) -> str:
        return read_metrics(self.db, self.history)
