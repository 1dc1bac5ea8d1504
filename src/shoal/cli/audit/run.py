"""Open a run's folder for an audit: verify the ledger's chain and its end, and open config, store and database.

The ledger and the tables are in the folder, or in the PostgreSQL database that the config names. Rollout files are in
the folder, or in a bucket.

Invariants: nothing is changed. The run's id ends in its coordinator's key, so a ledger signed by another key belongs to
another run; `--key` is the coordinator's key as the auditor knows it from elsewhere. The chain contains every head that
validators co-signed or that the auditor knows. It ends with the digests of all tables, unless the auditor accepts a run
that is in progress or was killed (`unsealed`).
"""

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.config import Config, ConfigError, load, parse
from shoal.config.sections import StoreSection
from shoal.coordinator.pool import TABLE_NAMES
from shoal.errors import ShoalError, check_extra
from shoal.ledger.chain import JSON, Entry, Head, LedgerError, check_contains, open_head, read_export, verify_chain
from shoal.ledger.connection import Connection, open_sqlite, table_digest
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Signed
from shoal.protocol.invite import run_id
from shoal.protocol.messages import Role
from shoal.store.folder import FileStore, Folder

DATABASE = "pool.sqlite"
HEADS = "*/head.json"  # in validators' folders
# The types of an entry's fields, except those that differ between kinds of entries.
TYPES: dict[str, type] = {
    **dict.fromkeys(("run", "config", "key", "name", "role", "worker", "validator", "submission", "reason"), str),
    **dict.fromkeys(("nonce", "digest", "file", "accepted", "record", "head"), str),
    **dict.fromkeys(("version", "step", "tokens", "amount"), int),
    **{"full": bool, "evidence": float, "submissions": list, "tables": dict},
}


class BrokenError(ShoalError):
    """A check failed. `link` names the entry, file or table that is wrong, and the message says why."""

    def __init__(self, link: str, why: object) -> None:
        super().__init__(f"{link}: {why}")
        self.link = link


@dataclass
class Checks:
    """The outcomes of an audit's checks. A check that fails raises BrokenError, so it is the last one."""

    passed: int = 0  # compared, and equal
    needed: Counter[str] = field(default_factory=Counter)  # not compared, though it matters: what and why -> how often
    unproven: Counter[str] = field(default_factory=Counter)  # not compared, and does not matter: the same

    def count(self, *, failed: int = 0) -> str:
        skipped = sum((self.needed + self.unproven).values())
        figures = f"{self.passed} yes, {failed} no, {skipped} not compared"
        return f"{self.passed + failed + skipped} checks: {figures}"


@dataclass(frozen=True)
class AuditedRun:
    """A run whose chain is verified."""

    folder: Path  # the run's folder, or its coordinator's
    chain: list[Entry]
    bodies: list[dict[str, JSON]]
    key: str
    run: str
    config: Config
    store: FileStore
    connection: Connection | None  # None: the ledger is an export
    keys: dict[Role, set[str]] = field(default_factory=dict)  # of all registered members, by role
    checks: Checks = field(default_factory=Checks)

    @property
    def coordinator(self) -> Path:
        return coordinator_folder(self.folder)

    def of(self, kind: str) -> list[dict[str, JSON]]:
        """Return the bodies of all entries of a kind."""
        return [body for entry, body in zip(self.chain, self.bodies, strict=True) if entry.kind == kind]


def coordinator_folder(folder: Path) -> Path:
    inner = folder / "coordinator"
    return inner if inner.is_dir() else folder


def open_run(folder: Path, *, key: str = "", export: Path | None = None) -> AuditedRun:
    """Open a run and verify its chain. `export`: the ledger as JSON lines, instead of the database. Raise BrokenError."""
    coordinator = coordinator_folder(folder)
    connection: Connection | None = None
    with checking("ledger"):
        if export:
            chain = list(read_export(export))
        else:
            connection = _connect(folder)
            chain = list(Ledger(connection).every_row())
    if not chain or chain[0].kind != "started":
        raise BrokenError(
            "ledger entry 1", "missing, or not the start of a run (or an earlier version of Shoal wrote it)"
        )
    with checking("ledger entry 1"):
        first = _parsed(chain[0])
        key = key or first["key"]
        verify_chain(chain, key)
        if run_id(first["run"], key) != first["run"]:
            raise BrokenError("ledger entry 1", f"the run {first['run']} was not started by {key}")
    bodies, keys = [], dict[Role, set[str]]()
    for entry in chain:
        with checking(link := f"ledger entry {entry.seq}"):
            bodies.append(body := _parsed(entry))
            if entry.kind == "started":
                config = read_config(body["config"], link)
            if entry.kind == "registered":
                keys.setdefault(body["role"], set()).add(body["key"])
    return AuditedRun(
        folder=folder,
        chain=chain,
        bodies=bodies,
        key=key,
        run=first["run"],
        config=config,
        store=_bucket(config.store) if config.store.url else Folder(coordinator / "store"),
        connection=connection,
        keys=keys,
    )


def _parsed(entry: Entry) -> dict[str, Any]:
    """Return an entry's body. Raise ValueError if a field has a wrong type."""
    body = json.loads(entry.body)
    if not isinstance(body, dict):
        raise ValueError("its body is not a JSON object")
    types = TYPES | ({"submissions": int} if entry.kind == "dismissed" else {})
    for name, value in body.items():
        if name in types and type(value) is not types[name]:  # a bool is also an int
            raise ValueError(f"its {name} is {value!r:.40}, not of the type {types[name].__name__}")
    return body


def settings_of(folder: Path) -> Config:
    """Return the config in a run's folder or its coordinator's, or else the defaults. Raise ConfigError."""
    for path in (folder / "config.toml", coordinator_folder(folder) / "config.toml"):
        if path.is_file():
            return load(path)
    return Config()


def read_config(text: str, link: str) -> Config:
    try:
        return parse(tomllib.loads(text), source=link)
    except (tomllib.TOMLDecodeError, ConfigError) as error:
        raise BrokenError(link, f"holds no valid config: {error}") from error


@contextmanager
def checking(link: str) -> Iterator[None]:
    """Turn any error raised inside into a BrokenError about this link."""
    try:
        yield
    except BrokenError:
        raise
    except LedgerError as error:  # its `seq` may name the entry
        raise BrokenError(f"ledger entry {error.seq}" if error.seq else link, error) from error
    except Exception as error:  # a hostile folder can cause any kind, such as RecursionError or the database's own
        raise BrokenError(link, f"{error}" or type(error).__name__) from error


def first_three(values: Iterable[str]) -> str:
    """Return at most three of these texts, for a message."""
    return ", ".join(sorted(values)[:3])


def _connect(folder: Path) -> Connection:
    path = coordinator_folder(folder) / DATABASE
    if path.is_file():
        with checking(path.name):
            sqlite = open_sqlite(path, read_only=True)
            result = sqlite.value("PRAGMA quick_check")
            if result != "ok":
                raise BrokenError(path.name, f"damaged: {result}")
            return sqlite
    with checking("config.toml"):
        database = settings_of(folder).coordinator.database
    if not database:
        raise BrokenError(str(path), "missing: name the folder of a run or of a coordinator")
    check_extra("postgres", "coordinator.database")
    from shoal.ledger.postgres import open_postgres

    with checking("database"):
        # The folder names this server, so the server may be hostile: it must get no password in the clear.
        connection = open_postgres(database, require_auth="scram-sha-256,none")
        connection.change("SET default_transaction_read_only = on")
    return connection


def _bucket(section: StoreSection) -> FileStore:
    check_extra("s3", "store.url")
    from shoal.store.bucket import Bucket

    with checking("store"):
        return Bucket(section.url, section.endpoint)


# --- the end of the chain --------------------------------------------------------------------------------------------


def check_heads(run: AuditedRun, known: Sequence[str]) -> list[Head]:
    """Check that the chain contains every co-signed and every `known` head. Return the co-signed ones. Raise BrokenError."""
    heads = []
    for entry, body in zip(run.chain, run.bodies, strict=True):
        if entry.kind == "witnessed":
            link = f"ledger entry {entry.seq}"
            with checking(link):
                if body["validator"] not in run.keys.get("validator", set()):
                    raise BrokenError(link, "co-signed by no validator of this run")
                head = open_head(Signed.model_validate_json(str(body["head"])), str(body["validator"]))
                if head.seq >= entry.seq:
                    raise BrokenError(link, f"co-signs entry {head.seq}, which comes later")
                _check_head(run, head, "its validator")
                heads.append(head)
    for path in sorted(run.folder.glob(HEADS)):
        link = str(path.relative_to(run.folder))
        with checking(link):
            signed = Signed.model_validate_json(path.read_bytes())
            if signed.key not in run.keys.get("validator", set()):
                raise BrokenError(link, "signed by no validator of this run")
            _check_head(run, open_head(signed, signed.key), link)
    for text in known:
        with checking(f"head {text[:20]}"):
            _check_head(run, Head.parse(text, run.run), "you")
    return heads


def check_end(run: AuditedRun, *, unsealed: bool) -> bool:
    """Compare the seal that ends the chain with the tables. Return whether they were compared.

    Raise BrokenError if they differ, or if there is no seal and `unsealed` is false.
    """
    for entry, following in zip(run.chain, run.chain[1:], strict=False):
        if entry.kind == "sealed" and following.kind != "started":
            raise BrokenError(f"ledger entry {following.seq}", "follows a seal, but is not a start of the coordinator")
    last, body = run.chain[-1], run.bodies[-1]
    if last.kind != "sealed":
        if unsealed:
            run.checks.unproven["tables: they are not sealed"] += len(TABLE_NAMES)
            return False
        raise BrokenError(
            f"ledger entry {last.seq + 1}",
            "missing: the ledger does not end with a seal. Entries were cut off, or the coordinator still runs or was "
            "killed; stop it with Ctrl-C, or audit the ledger as it is with --unsealed",
        )
    if run.connection is None:
        run.checks.needed["tables: the ledger was read from an export"] += len(TABLE_NAMES)
        return False
    with checking(f"ledger entry {last.seq}"):
        sealed = body["tables"]
        if not isinstance(sealed, dict) or set(sealed) != set(TABLE_NAMES):
            raise BrokenError(f"ledger entry {last.seq}", "its sealed tables are not those of this Shoal version")
    for name in TABLE_NAMES:
        with checking(f"table {name}"):
            if table_digest(run.connection, name) != sealed[name]:
                raise BrokenError(f"table {name}", "changed after the coordinator sealed it")
    run.checks.passed += len(TABLE_NAMES)
    return True


def _check_head(run: AuditedRun, head: Head, whose: str) -> None:
    if head.run != run.run:
        raise LedgerError(f"the head belongs to the run {head.run[:60]}, not to this run")
    check_contains(run.chain, head, whose)
