"""What all parts of the pool share: the tables of members, submissions and groups, what the run has done, and the ledger.

Invariants: what happens inside `transaction()`, ledger entries included, happens whole or not at all, so kill -9 at any
moment leaves consistent state. A version has one digest. Every entry of the history, including a replacement, gets a higher
sequence number than all before it, so a reader that asks with the last cursor it got misses nothing and gets nothing twice;
a page of it is bounded in bytes, because anyone may ask for one, and only the newest samples are kept.

    started   in the ledger: run, config, formats; at each start
    sealed    the digest of every table; at each stop that is not a kill; the next start ends its validity

While a ledger ends with `sealed`, its database holds what it held when the coordinator stopped, or somebody else changed it.
A ledger that ends otherwise is of a coordinator that runs or was killed, or its end was cut off.
Tables that one part alone needs stand in its file. One thread uses the database; the clock is an argument.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal

from shoal import config as config_module
from shoal.config import Config
from shoal.coordinator import groups, nodes, submissions
from shoal.ledger.chain import JSON
from shoal.ledger.connection import SERIAL, Connection, table_digest
from shoal.ledger.table import Ledger
from shoal.protocol.history import MAX_SAMPLES, History, WorkerSample
from shoal.protocol.messages import VERSION, Evaluation
from shoal.protocol.pace import Refusal

FORMAT = 11  # of a run's tables, manifests and submissions; a run in another format is not resumed
POLICIES = """CREATE TABLE IF NOT EXISTS policies (
    version BIGINT PRIMARY KEY, digest TEXT NOT NULL, size_bytes BIGINT NOT NULL, published_s DOUBLE PRECISION NOT NULL)"""
HISTORY = f"""CREATE TABLE IF NOT EXISTS history (
    seq {SERIAL}, kind TEXT NOT NULL, key TEXT NOT NULL, body TEXT NOT NULL, UNIQUE (kind, key))"""
RUN = "CREATE TABLE IF NOT EXISTS run (started_s DOUBLE PRECISION NOT NULL)"
SCHEMA = [*nodes.SCHEMA, *submissions.SCHEMA, *groups.SCHEMA, POLICIES, HISTORY, RUN]
PAGE_BYTES = 256 << 10  # of entries in one answer; a larger entry comes alone
OWN_BYTES = 4 << 20  # likewise, of what this process itself reads: its record is written again with each page
READ = 32  # entries, at once

Kind = Literal["step", "evaluation", "sample"]


class PoolError(Refusal):
    """A request that the pool's state does not allow."""


class Policies:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def add(self, version: int, digest: str, size_bytes: int, published_s: float) -> None:
        self.connection.change(
            "INSERT INTO policies (version, digest, size_bytes, published_s) VALUES (?, ?, ?, ?)",
            *(version, digest, size_bytes, published_s),
        )

    def digest(self, version: int) -> str | None:
        found: str | None = self.connection.value("SELECT digest FROM policies WHERE version = ?", version)
        return found

    def oldest_of_newest(self, count: int) -> int | None:
        """The oldest of the newest `count` versions; None if fewer were published."""
        found: int | None = self.connection.value(
            "SELECT version FROM policies ORDER BY version DESC LIMIT 1 OFFSET ?", count - 1
        )
        return found

    def newest(self) -> int | None:
        found: int | None = self.connection.value("SELECT max(version) FROM policies")
        return found


class HistoryTable:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def bodies(self, kind: Kind) -> list[str]:
        """Of all entries of a kind, oldest first."""
        return [body for (body,) in self.connection.rows("SELECT body FROM history WHERE kind = ? ORDER BY seq", kind)]

    def has(self, kind: Kind, key: str) -> bool:
        return self.connection.row("SELECT 1 FROM history WHERE kind = ? AND key = ?", kind, key) is not None

    def count(self, kind: Kind) -> int:
        return int(self.connection.value("SELECT count(*) FROM history WHERE kind = ?", kind))

    def put(self, kind: Kind, key: str, body: str) -> bool:
        """Append an entry; it replaces an earlier one of the same kind and key. True if there was none."""
        with self.connection.transaction():
            replaced = self.connection.change("DELETE FROM history WHERE kind = ? AND key = ?", kind, key)
            self.connection.change("INSERT INTO history (kind, key, body) VALUES (?, ?, ?)", kind, key, body)
        return replaced == 0

    def put_samples(self, samples: list[WorkerSample]) -> None:
        """Append sample completions, and drop the oldest beyond the limit."""
        with self.connection.transaction():
            for sample in samples:
                self.put("sample", f"{sample.submission}/{sample.group}", sample.model_dump_json())
            self.connection.change(
                "DELETE FROM history WHERE kind = 'sample' AND seq <="
                " (SELECT seq FROM history WHERE kind = 'sample' ORDER BY seq DESC LIMIT 1 OFFSET ?)",
                MAX_SAMPLES,
            )

    def after(self, cursor: int) -> History:
        """The next entries after `cursor`, for this process itself; 0 is before the first."""
        return History.model_validate_json(self.page(cursor, OWN_BYTES))

    def page(self, cursor: int, most_bytes: int = PAGE_BYTES) -> bytes:
        """The next entries after `cursor`, as the JSON of a `History`."""
        bodies: dict[Kind, list[str]] = {"step": [], "evaluation": [], "sample": []}
        size_bytes = 0
        for seq, kind, body in self._rows_after(cursor):
            length = len(body.encode())
            if size_bytes and size_bytes + length > most_bytes:
                break
            bodies[kind].append(body)
            size_bytes, cursor = size_bytes + length, seq
        metrics, evaluations, samples = (",".join(bodies[kind]) for kind in ("step", "evaluation", "sample"))
        text = f'{{"cursor":{cursor},"metrics":[{metrics}],"evaluations":[{evaluations}],"samples":[{samples}]}}'
        return text.encode()

    def _rows_after(self, cursor: int) -> Iterator[tuple[int, Kind, str]]:
        select = "SELECT seq, kind, body FROM history WHERE seq > ? ORDER BY seq LIMIT ?"
        while rows := self.connection.rows(select, cursor, READ):
            yield from rows
            cursor = rows[-1][0]

    def newest_step(self) -> dict[str, float]:
        """Metrics of the step that was reported last; empty if there is none."""
        return json.loads(self._newest("step") or "{}")  # type: ignore[no-any-return]

    def newest_evaluation(self) -> Evaluation | None:
        body = self._newest("evaluation")
        return None if body is None else Evaluation.model_validate_json(body)

    def _newest(self, kind: Kind) -> str | None:
        found: str | None = self.connection.value(
            "SELECT body FROM history WHERE kind = ? ORDER BY seq DESC LIMIT 1", kind
        )
        return found


class Database:
    def __init__(self, connection: Connection, ledger: Ledger, clock: Callable[[], float]) -> None:
        """`ledger` must use the same connection. Raises PoolError for a run in another format."""
        self.connection = connection
        self.ledger = ledger
        self.clock = clock
        self.nodes = nodes.Nodes(connection)
        self.submissions = submissions.Submissions(connection)
        self.groups = groups.Groups(connection)
        self.grades = groups.Grades(connection)
        self.policies = Policies(connection)
        self.history = HistoryTable(connection)
        found = connection.format
        if connection.has_table("run") and found != FORMAT:
            raise PoolError(
                f"{connection.place} belongs to a run in format {found}; this version of Shoal resumes format {FORMAT}."
                " Finish the run with the version that started it, or start a new run with its last weights (model.name)"
            )

    def create(self, schema: Iterable[str] = SCHEMA) -> None:
        """Create what is not there. A run that has started keeps the time of its start."""
        self.connection.set_format(FORMAT)
        for statement in schema:
            self.connection.create(statement)
        self.connection.change(
            "INSERT INTO run (started_s) SELECT ? WHERE NOT EXISTS (SELECT 1 FROM run)", self.clock()
        )

    def transaction(self) -> AbstractContextManager[None]:
        """All of the block or nothing of it. A nested block belongs to the outer one: an error undoes both."""
        return self.connection.transaction()

    def started_s(self) -> float:
        return float(self.connection.value("SELECT started_s FROM run"))

    def open_step(self) -> int:
        """The smallest step that lacks accepted groups."""
        return self.groups.open_step()

    def is_trained(self, steps: int) -> bool:
        """Whether the last of `steps` steps was trained on."""
        return self.history.has("step", str(steps - 1))

    def is_finished(self, steps: int) -> bool:
        """Whether the last version, after `steps` steps, was evaluated, which ends the run."""
        return self.history.has("evaluation", f"{steps} final")


def record_start(db: Database, run: str, key: str, config: Config) -> None:
    body: dict[str, JSON] = {
        "run": run,
        "key": key,
        "config": config_text(config),
        "format": FORMAT,
        "protocol": VERSION,
    }
    db.ledger.append("started", body)


def config_text(config: Config) -> str:
    """The config as TOML, without what is nobody else's matter: members read the ledger."""
    section = config.coordinator.model_copy(update={"database": ""})
    ledger = config.ledger.model_copy(update={"rpc": "", "key_file": ""})
    return config_module.dumps(config.model_copy(update={"coordinator": section, "ledger": ledger}))


def seal(db: Database, tables: Sequence[str]) -> None:
    with db.transaction():
        db.ledger.append("sealed", {"tables": {name: table_digest(db.connection, name) for name in tables}})
