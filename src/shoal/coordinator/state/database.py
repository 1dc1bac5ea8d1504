"""The pool's database: its tables and the ledger, which change together.

Invariant: what happens inside `transaction()`, ledger entries included, happens whole or not at all, so kill -9 at any
moment leaves consistent state. Called by the other parts of the pool, which hold no SQL. One thread uses it; the clock is
an argument.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from shoal.coordinator.tables import (
    credits,
    curricula,
    digests,
    evidence,
    fingerprints,
    grades,
    groups,
    history,
    nodes,
    policies,
    replays,
    runs,
    submissions,
    transfers,
)
from shoal.coordinator.tables.connection import Connection
from shoal.ledger.interface import Ledger
from shoal.protocol.answers import Refusal

FORMAT = 10  # of a run's tables, manifests and submissions; a run in another format is not resumed
TABLES = (nodes, submissions, groups, curricula, policies, history, runs, fingerprints, replays, evidence)
SCHEMA = [statement for table in TABLES for statement in table.SCHEMA]
TABLE_NAMES = digests.table_names(SCHEMA)  # that are sealed


class PoolError(Refusal):
    """A request that the pool's state does not allow."""


class Database:
    def __init__(
        self, connection: Connection, ledger: Ledger, clock: Callable[[], float], *, create: bool = True
    ) -> None:
        """`ledger` must use the same connection. `create`: False to read a run that another process writes.

        Raises PoolError for a run in another format.
        """
        self.connection = connection
        self.ledger = ledger
        self.clock = clock
        self.nodes = nodes.Nodes(self.connection)
        self.submissions = submissions.Submissions(self.connection)
        self.credits = credits.Credits(self.connection)
        self.fingerprints = fingerprints.Fingerprints(self.connection)
        self.replays = replays.Replays(self.connection)
        self.evidence = evidence.EvidenceTable(self.connection)
        self.groups = groups.Groups(self.connection)
        self.grades = grades.Grades(self.connection)
        self.curricula = curricula.Curricula(self.connection)
        self.policies = policies.Policies(self.connection)
        self.history = history.HistoryTable(self.connection)
        self.run = runs.Run(self.connection)
        self.transfers = transfers.Transfers(self.connection)
        self._check_format()
        if create:
            self._create()

    def transaction(self) -> AbstractContextManager[None]:
        """All of the block or nothing of it. A nested block belongs to the outer one: an error undoes both."""
        return self.connection.transaction()

    def open_step(self) -> int:
        """The smallest step that lacks accepted groups."""
        return self.groups.open_step()

    def is_trained(self, steps: int) -> bool:
        """Whether the last of `steps` steps was trained on."""
        return self.history.has("step", str(steps - 1))

    def is_finished(self, steps: int) -> bool:
        """Whether the last version, after `steps` steps, was evaluated, which ends the run."""
        return self.history.has("evaluation", f"{steps} final")

    def _check_format(self) -> None:
        found = self.connection.format
        if self.connection.has_table("run") and found != FORMAT:
            raise PoolError(
                f"{self.connection.place} belongs to a run in format {found}; this version of Shoal resumes format {FORMAT}."
                " Finish the run with the version that started it, or start a new run with its last weights (model.name)"
            )

    def _create(self) -> None:
        self.connection.set_format(FORMAT)
        for statement in [*SCHEMA, *transfers.SCHEMA]:
            self.connection.create(statement)
        self.run.start(self.clock())
