"""A pool whose tables are in PostgreSQL, watched by its folder: answers as from SQLite, in a session that cannot write."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.coordinator.members import DOWNLOADS
from shoal.coordinator.pool import SCHEMA
from shoal.dashboard.watched import WatchedFolder
from shoal.ledger.connection import Connection

from ..servers import postgres_server
from .conftest import Serving
from .test_server import ASKED

pytestmark = pytest.mark.slow
LEDGER = (
    "CREATE TABLE ledger (seq BIGINT PRIMARY KEY, time_s BIGINT, kind TEXT, body TEXT, previous TEXT, digest TEXT,"
    " signature TEXT)"
)


@pytest.fixture(scope="module")
def moved(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The finished run with its tables in PostgreSQL: a folder of the config and the stored files."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'shoal[postgres]'")
    from shoal.ledger.postgres import open_postgres

    with postgres_server() as url:
        connection = open_postgres(url)
        for statement in [*SCHEMA, *DOWNLOADS, LEDGER]:
            connection.create(statement)
        source = sqlite3.connect(f"file:{finished / 'coordinator' / 'pool.sqlite'}?mode=ro", uri=True)
        connection.set_format(source.execute("PRAGMA user_version").fetchone()[0])
        for (table,) in source.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        ):
            copy(source, connection, table)
        connection.close()
        folder = tmp_path_factory.mktemp("moved")
        (folder / "coordinator").mkdir()
        (folder / "coordinator" / "store").symlink_to(finished / "coordinator" / "store")
        (folder / "config.toml").write_text(f'[coordinator]\ndatabase = "{url}"\n')
        yield folder


def copy(source: sqlite3.Connection, target: Connection, table: str) -> None:
    kinds = dict(
        target.rows("SELECT column_name, data_type FROM information_schema.columns WHERE table_name = ?", table)
    )
    names = [row[1] for row in source.execute(f"PRAGMA table_info({table})")]
    for row in source.execute(f"SELECT {', '.join(names)} FROM {table}"):
        values: list[Any] = [
            bool(value) if kinds[name] == "boolean" and value is not None else value
            for name, value in zip(names, row, strict=True)
        ]
        marks = ", ".join("?" * len(names))
        target.change(f"INSERT INTO {table} ({', '.join(names)}) OVERRIDING SYSTEM VALUE VALUES ({marks})", *values)


def test_every_answer_is_that_of_sqlite(moved: Path, finished: Path, serving: Serving) -> None:
    here, there = serving(finished), serving(moved)
    for path in ASKED:
        one, other = httpx.get(here + path), httpx.get(there + path)
        assert other.status_code == 200, (path, other.text)
        assert same(one.json()) == same(other.json()), path


def same(answer: Any) -> Any:
    """Without the run's name, which is in the coordinator's address file, and the tokens' texts, which need its model."""
    if isinstance(answer, dict):
        return {key: same(value) for key, value in answer.items() if key not in ("name", "tokens", "prompt")}
    return [same(one) for one in answer] if isinstance(answer, list) else answer


def test_the_session_cannot_write(moved: Path) -> None:
    run = WatchedFolder(moved)
    with pytest.raises(Exception, match="read-only transaction"):
        run.connection.change("DELETE FROM nodes")
    run.close()
