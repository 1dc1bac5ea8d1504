"""The pool's shared state: tables of members, submissions and groups, policy versions, history, and the ledger.

Invariants: `transaction()` is atomic, ledger entries included, so kill -9 at any moment leaves consistent state. A
version has one digest. Every history entry, even a replacement, gets a higher sequence number than all earlier entries.
So a reader that continues from its last cursor misses no entry and gets none twice. Anyone may request a page of
history, so a page's size is bounded. Only the newest samples are kept.

Ledger entries:
    started   at each start: run, config, formats
    sealed    at each clean stop: the digest of every table; no longer valid after the next start

If the ledger ends with `sealed` but a table does not match its digest, the database was changed after the coordinator
stopped. If it ends with another entry, the coordinator is running or was killed, or the ledger was truncated.
Tables that only one part needs are defined in that part's file. One thread uses the database.
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
from shoal.protocol.messages import MAX_KEPT, VERSION, Evaluation
from shoal.protocol.pace import Refusal
from shoal.shardcast.store import KEEP

FORMAT = 12  # version of tables, manifests and submissions; a run in another format is not resumed
POLICIES = """CREATE TABLE IF NOT EXISTS policies (
    version BIGINT PRIMARY KEY, digest TEXT NOT NULL, size_bytes BIGINT NOT NULL, published_s DOUBLE PRECISION NOT NULL)"""
HISTORY = f"""CREATE TABLE IF NOT EXISTS history (
    seq {SERIAL}, kind TEXT NOT NULL, key TEXT NOT NULL, body TEXT NOT NULL, UNIQUE (kind, key))"""
RUN = "CREATE TABLE IF NOT EXISTS run (started_s DOUBLE PRECISION NOT NULL)"
SCHEMA = [*nodes.SCHEMA, *submissions.SCHEMA, *groups.SCHEMA, POLICIES, HISTORY, RUN]
PAGE_BYTES = 256 << 10  # limit on the total size of a response's entries; an entry above the limit is sent alone
OWN_PAGE_BYTES = 4 << 20  # limit when this process reads; larger, because it rewrites the run's metrics after each page
READ_ROWS = 32  # rows per query

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
        digest: str | None = self.connection.value("SELECT digest FROM policies WHERE version = ?", version)
        return digest

    def oldest_of_newest(self, count: int) -> int | None:
        """Return the oldest of the newest `count` versions; None if fewer were published."""
        version: int | None = self.connection.value(
            "SELECT version FROM policies ORDER BY version DESC LIMIT 1 OFFSET ?", count - 1
        )
        return version

    def newest(self) -> int | None:
        version: int | None = self.connection.value("SELECT max(version) FROM policies")
        return version


class HistoryTable:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def bodies(self, kind: Kind) -> list[str]:
        """Return the bodies of all entries of a kind, oldest first."""
        return [body for (body,) in self.connection.rows("SELECT body FROM history WHERE kind = ? ORDER BY seq", kind)]

    def has(self, kind: Kind, key: str) -> bool:
        return self.connection.row("SELECT 1 FROM history WHERE kind = ? AND key = ?", kind, key) is not None

    def count(self, kind: Kind) -> int:
        return int(self.connection.value("SELECT count(*) FROM history WHERE kind = ?", kind))

    def put(self, kind: Kind, key: str, body: str) -> bool:
        """Append an entry, replacing one of the same kind and key. Return whether it is new."""
        with self.connection.transaction():
            replaced = self.connection.change("DELETE FROM history WHERE kind = ? AND key = ?", kind, key)
            self.connection.change("INSERT INTO history (kind, key, body) VALUES (?, ?, ?)", kind, key, body)
        return replaced == 0

    def put_samples(self, samples: list[WorkerSample]) -> None:
        """Append sample completions; keep the newest MAX_SAMPLES."""
        with self.connection.transaction():
            for sample in samples:
                self.put("sample", f"{sample.submission}/{sample.group}", sample.model_dump_json())
            self.connection.change(
                "DELETE FROM history WHERE kind = 'sample' AND seq <="
                " (SELECT seq FROM history WHERE kind = 'sample' ORDER BY seq DESC LIMIT 1 OFFSET ?)",
                MAX_SAMPLES,
            )

    def after(self, cursor: int) -> History:
        """Return the next entries after `cursor` (0: from the first). Only this process itself uses these larger pages."""
        return History.model_validate_json(self.page(cursor, OWN_PAGE_BYTES, without=""))

    def page(self, cursor: int, max_bytes: int = PAGE_BYTES, *, without: Kind | Literal[""] = "sample") -> bytes:
        """Return the next entries after `cursor`, as the JSON of a `History`.

        Pages for others are `without` samples, because a completion with its reward can tell a task's answer.
        """
        bodies: dict[Kind, list[str]] = {"step": [], "evaluation": [], "sample": []}
        size_bytes = 0
        for seq, kind, body in self._rows_after(cursor, without):
            length = len(body.encode())
            if size_bytes and size_bytes + length > max_bytes:
                break
            bodies[kind].append(body)
            size_bytes, cursor = size_bytes + length, seq
        metrics, evaluations, samples = (",".join(bodies[kind]) for kind in ("step", "evaluation", "sample"))
        text = f'{{"cursor":{cursor},"metrics":[{metrics}],"evaluations":[{evaluations}],"samples":[{samples}]}}'
        return text.encode()

    def _rows_after(self, cursor: int, without: str) -> Iterator[tuple[int, Kind, str]]:
        select = "SELECT seq, kind, body FROM history WHERE seq > ? AND kind <> ? ORDER BY seq LIMIT ?"
        while rows := self.connection.rows(select, cursor, without, READ_ROWS):
            yield from rows
            cursor = rows[-1][0]

    def newest_step(self) -> dict[str, float]:
        """Return the metrics of the step that was reported last; empty if there is none."""
        return json.loads(self._newest("step") or "{}")  # type: ignore[no-any-return]

    def newest_evaluation(self) -> Evaluation | None:
        body = self._newest("evaluation")
        return None if body is None else Evaluation.model_validate_json(body)

    def _newest(self, kind: Kind) -> str | None:
        body: str | None = self.connection.value(
            "SELECT body FROM history WHERE kind = ? ORDER BY seq DESC LIMIT 1", kind
        )
        return body


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
        stored = connection.format
        if connection.has_table("run") and stored != FORMAT:
            raise PoolError(
                f"{connection.place} belongs to a run in format {stored}; this version of Shoal resumes format {FORMAT}."
                " Finish the run with the version that started it, or start a new run with its last weights (model.name)"
            )

    def create(self, schema: Iterable[str] = SCHEMA) -> None:
        """Create missing tables. A run that has started keeps its start time."""
        self.connection.set_format(FORMAT)
        for statement in schema:
            self.connection.create(statement)
        self.connection.change(
            "INSERT INTO run (started_s) SELECT ? WHERE NOT EXISTS (SELECT 1 FROM run)", self.clock()
        )

    def transaction(self) -> AbstractContextManager[None]:
        """Open a transaction. A nested block belongs to the outer one: an error undoes both."""
        return self.connection.transaction()

    def started_s(self) -> float:
        return float(self.connection.value("SELECT started_s FROM run"))

    def open_step(self) -> int:
        """Return the smallest step whose batch is not full."""
        return self.groups.open_step()

    def is_trained(self, steps: int) -> bool:
        """Return whether the last of `steps` steps was trained."""
        return self.history.has("step", str(steps - 1))

    def is_finished(self, steps: int) -> bool:
        """Return whether the run has ended: the version after `steps` steps was evaluated, and no work is in doubt."""
        return self.history.has("evaluation", f"{steps} final") and not self.submissions.doubted_workers()

    def oldest_held(self) -> int | None:
        """Return the oldest version that origin and relays keep anyway; None if they have not dropped any."""
        return self.policies.oldest_of_newest(KEEP)

    def kept_versions(self) -> list[int]:
        """Return the older versions that origin and relays keep, because validators judge work of them.

        The oldest version that they keep anyway may be among these, because the next publication drops it.
        """
        oldest = self.oldest_held()
        return [] if oldest is None else self.submissions.versions_in_check(oldest + 1, self.clock(), MAX_KEPT)


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
    """Return the config as TOML, for the ledger. Leave out private fields, because validators read the ledger."""
    section = config.coordinator.model_copy(update={"database": ""})
    ledger = config.ledger.model_copy(update={"rpc": "", "key_file": ""})
    return config_module.dumps(config.model_copy(update={"coordinator": section, "ledger": ledger}))


def seal(db: Database, tables: Sequence[str]) -> None:
    with db.transaction():
        db.ledger.append("sealed", {"tables": {name: table_digest(db.connection, name) for name in tables}})
