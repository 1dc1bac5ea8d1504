import sqlite3
import time
from pathlib import Path

import pytest

from shoal.coordinator.database import FORMAT, Database, PoolError
from shoal.ledger.chain import Ledger
from shoal.protocol.identity import Identity

from .support import ALICE, BOB, open_pool, payload


def test_a_transaction_inside_another_is_undone_with_it() -> None:
    desk = open_pool()
    with pytest.raises(RuntimeError), desk.pool.db.transaction():
        desk.pool.members.register(ALICE, payload("alice"), None)
        raise RuntimeError
    assert desk.pool.members.role(ALICE) is None and desk.kinds() == []


def test_an_error_inside_the_inner_one_undoes_the_outer_too() -> None:
    desk = open_pool()
    with pytest.raises(RuntimeError), desk.pool.db.transaction():
        desk.pool.members.register(ALICE, payload("alice"), None)
        with desk.pool.db.transaction():
            raise RuntimeError
    assert desk.pool.members.role(ALICE) is None
    desk.pool.members.register(BOB, payload("alice"), None)
    assert desk.pool.members.role(BOB) == "worker", "and no transaction is left open"


def test_a_run_that_another_version_began_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"

    def opened() -> sqlite3.Connection:
        connection = sqlite3.connect(path, isolation_level=None)
        Database(connection, Ledger(connection, Identity.generate(), clock=time.time), time.time)
        return connection

    opened().close()
    again = opened()  # of this version: opens
    again.execute(f"PRAGMA user_version = {FORMAT - 1}")
    again.execute("DROP TABLE groups")
    again.close()
    with pytest.raises(PoolError, match=rf"{path} is of a run in format {FORMAT - 1}.*start a new one"):
        opened()
    with sqlite3.connect(path) as untouched:
        assert untouched.execute("SELECT 1 FROM sqlite_master WHERE name = 'groups'").fetchone() is None
