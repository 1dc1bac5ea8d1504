"""Only one coordinator at a time uses a folder or schema, and a later one refuses requests that were already served."""

import multiprocessing
import os
import shutil
import signal
import sqlite3
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import pytest

from shoal.config.sections import CoordinatorSection
from shoal.coordinator import folder as folder_module
from shoal.coordinator.database import FORMAT, Database, PoolError
from shoal.coordinator.folder import NONCES, TABLES, PoolFolderError, open_state
from shoal.errors import restart_helps
from shoal.ledger.connection import DatabaseFileError, DatabaseFullError, DatabaseLostError, SqliteConnection
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Identity
from shoal.protocol.signing import SignatureError
from shoal.watch.record import STATE

from .support import ALICE, BOB, open_pool, payload

PATIENCE_S = 60.0


@pytest.fixture(params=["sqlite", "postgres"])
def section(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CoordinatorSection:
    if request.param == "sqlite":
        return CoordinatorSection()
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'shoal[postgres]'")
    from .backends import schema_url

    server = request.getfixturevalue("postgres")
    return CoordinatorSection(database=schema_url(server, f"{request.node.name} {time.time_ns()}"))


def _work_and_hang(folder: Path, section: CoordinatorSection, works: Pipe) -> None:
    tables, _ = open_state(folder, section)
    with tables.transaction():
        tables.change("CREATE TABLE half (done BOOLEAN)")
        works.send(True)
        time.sleep(PATIENCE_S)


def test_a_second_coordinator_refuses_to_start_until_the_first_is_killed(
    section: CoordinatorSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    first = context.Process(target=_work_and_hang, args=(tmp_path, section, theirs))
    first.start()
    try:
        assert ours.poll(PATIENCE_S) and first.pid
        monkeypatch.setattr(folder_module, "LOCK_S", 0.3)
        with pytest.raises(PoolFolderError, match=r"another coordinator uses .*: stop it"):
            open_state(tmp_path, section)
        monkeypatch.setattr(folder_module, "LOCK_S", PATIENCE_S)
        os.kill(first.pid, signal.SIGKILL)
        first.join(PATIENCE_S)
        tables, _ = open_state(tmp_path, section)
        assert not tables.has_table("half"), "the unfinished transaction was not rolled back"
    finally:
        first.kill()
        first.join()


def test_a_coordinator_whose_session_was_ended_cannot_write_any_more(postgres: str) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'shoal[postgres]'")
    from shoal.ledger.postgres import open_postgres

    from .backends import schema_url

    url = schema_url(postgres, f"ended {time.time_ns()}")
    first, other = open_postgres(url), open_postgres(url)
    assert first.lock(0.0) and not other.lock(0.0)
    first.change("CREATE TABLE written (by TEXT)")
    with pytest.raises(DatabaseLostError), first.transaction():
        first.change("INSERT INTO written VALUES ('before')")
        other.value("SELECT pg_terminate_backend(?)", first.postgres.info.backend_pid)
        assert other.lock(PATIENCE_S)
        first.change("INSERT INTO written VALUES ('after')")
    assert other.rows("SELECT * FROM written") == []


def test_a_restored_copy_refuses_requests_signed_before_it_was_opened(tmp_path: Path) -> None:
    """The backup in docs/operate.md copies the tables but not the nonces."""
    first, copy, earlier_s = tmp_path / "pool", tmp_path / "copy", int(time.time()) - 1
    first.mkdir()
    copy.mkdir()
    tables, nonces = open_state(first, CoordinatorSection())
    tables.change("CREATE TABLE run (started_s REAL)")  # as the pool does
    assert nonces.spend(ALICE, "served", earlier_s)
    tables.close()
    shutil.copy(first / TABLES, copy / TABLES)
    (copy / STATE).write_text("{}")
    assert not (copy / NONCES).exists()
    _, again = open_state(copy, CoordinatorSection())
    with pytest.raises(SignatureError, match="before this server opened its database: sign it again"):
        again.spend(ALICE, "served", earlier_s)
    assert again.spend(ALICE, "new", int(time.time()) + 2)


@pytest.mark.parametrize("left", [NONCES, STATE])
def test_a_coordinator_that_has_run_does_not_start_without_its_tables(tmp_path: Path, left: str) -> None:
    open_state(tmp_path, CoordinatorSection())
    (tmp_path / TABLES).unlink()
    _, nonces = open_state(tmp_path, CoordinatorSection())  # it was killed before it served a request
    (tmp_path / TABLES).unlink()
    if left == NONCES:
        assert nonces.spend(ALICE, "served", int(time.time()) + 2)
    else:
        (tmp_path / STATE).write_text("{}")
    for _ in range(2):
        with pytest.raises(
            PoolFolderError, match=rf"{TABLES} is missing, but this .* has run: restore it from a backup"
        ):
            open_state(tmp_path, CoordinatorSection())


# --- transactions, a full or failing disk, another format ------------------------------------------------------------


@pytest.mark.usefixtures("every_database")
@pytest.mark.parametrize("fails", ["outer", "inner"])
def test_an_error_in_a_nested_transaction_or_around_it_undoes_both(fails: str) -> None:
    harness = open_pool()
    with pytest.raises(RuntimeError), harness.pool.db.transaction():
        harness.pool.members.register(ALICE, payload("alice"), None)
        with harness.pool.db.transaction() if fails == "inner" else nullcontext():
            raise RuntimeError
    assert harness.pool.members.role(ALICE) is None and harness.kinds() == []
    harness.pool.members.register(BOB, payload("alice"), None)
    assert harness.pool.members.role(BOB) == "worker", "a transaction was left open"


def test_a_full_disk_is_reported_and_leaves_no_part_of_a_transaction(tmp_path: Path) -> None:
    harness = open_pool(tmp_path / "pool.sqlite")
    connection = harness.pool.db.connection
    assert isinstance(connection, SqliteConnection)
    sqlite = connection.sqlite
    sqlite.execute(f"PRAGMA max_page_count = {sqlite.execute('PRAGMA page_count').fetchone()[0]}")
    with pytest.raises(DatabaseFullError, match=r"the disk of .*pool.sqlite is full: free space there"):
        for number in range(100):
            harness.join(f"{number:032x}" * 2, name=f"w-{number}")
    joined = len(harness.status().nodes)
    assert harness.kinds() == ["registered"] * joined
    sqlite.execute("PRAGMA max_page_count = 100000")
    harness.join(ALICE)
    assert len(harness.status().nodes) == joined + 1


@pytest.mark.parametrize("intact_bytes", [0, 4096], ids=["header", "table"])
@pytest.mark.parametrize(
    ("name", "remedy"), [(TABLES, "restore it from a backup"), (NONCES, "remove it: the next start")]
)
def test_a_damaged_database_is_named_with_the_next_step(
    tmp_path: Path, name: str, remedy: str, intact_bytes: int
) -> None:
    tables, nonces = open_state(tmp_path, CoordinatorSection())
    tables.change("CREATE TABLE run (started_s REAL)")
    for connection in (tables, nonces.connection):
        connection.close()
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[:intact_bytes] + b"x" * (len(data) - intact_bytes))
    with pytest.raises(DatabaseFileError, match=rf"{tmp_path / name} is damaged .*: {remedy}") as raised:
        open_state(tmp_path, CoordinatorSection())[0].rows("SELECT * FROM run")
    assert not restart_helps(raised.value)


def test_a_run_in_another_format_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"

    def opened() -> sqlite3.Connection:
        connection = sqlite3.connect(path, isolation_level=None)
        ledger = Ledger(SqliteConnection(connection), Identity.generate())
        Database(SqliteConnection(connection), ledger, time.time).create()
        return connection

    opened().close()
    again = opened()  # opens, because it is in this version's format
    again.execute(f"PRAGMA user_version = {FORMAT - 1}")
    again.execute("DROP TABLE groups")
    again.close()
    with pytest.raises(PoolError, match=rf"{path} belongs to a run in format {FORMAT - 1}.*start a new run"):
        opened()
    with sqlite3.connect(path) as untouched:
        assert untouched.execute("SELECT 1 FROM sqlite_master WHERE name = 'groups'").fetchone() is None
