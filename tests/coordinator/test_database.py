import sqlite3
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from shoal.coordinator.database import FORMAT, Database, PoolError
from shoal.ledger.connection import DatabaseFullError, SqliteConnection
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Identity

from .support import ALICE, BOB, open_pool, payload


@pytest.mark.usefixtures("every_database")
@pytest.mark.parametrize("fails", ["outer", "inner"])
def test_a_transaction_inside_another_is_undone_with_it(fails: str) -> None:
    harness = open_pool()
    with pytest.raises(RuntimeError), harness.pool.db.transaction():
        harness.pool.members.register(ALICE, payload("alice"), None)
        with harness.pool.db.transaction() if fails == "inner" else nullcontext():
            raise RuntimeError
    assert harness.pool.members.role(ALICE) is None and harness.kinds() == []
    harness.pool.members.register(BOB, payload("alice"), None)
    assert harness.pool.members.role(BOB) == "worker", "and no transaction is left open"


def test_a_full_disk_is_named_and_leaves_no_part_of_a_transaction(tmp_path: Path) -> None:
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


def test_a_run_that_another_version_began_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"

    def opened() -> sqlite3.Connection:
        connection = sqlite3.connect(path, isolation_level=None)
        ledger = Ledger(SqliteConnection(connection), Identity.generate())
        Database(SqliteConnection(connection), ledger, time.time).create()
        return connection

    opened().close()
    again = opened()  # of this version: opens
    again.execute(f"PRAGMA user_version = {FORMAT - 1}")
    again.execute("DROP TABLE groups")
    again.close()
    with pytest.raises(PoolError, match=rf"{path} belongs to a run in format {FORMAT - 1}.*start a new run"):
        opened()
    with sqlite3.connect(path) as untouched:
        assert untouched.execute("SELECT 1 FROM sqlite_master WHERE name = 'groups'").fetchone() is None
