"""The databases on which the tests of the coordinator's tables run.

A test module runs on each of them with `pytestmark = pytest.mark.usefixtures("every_database")` (a fixture in `conftest`).
"""

import hashlib
import secrets
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import psycopg

from shoal.ledger.connection import Connection
from shoal.ledger.postgres import open_postgres


def schema_url(server: str, name: str) -> str:
    """Return the URL of a database on this server for one test. The same name gives the same database."""
    schema = "t" + hashlib.sha256(name.encode()).hexdigest()[:16]
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}".encode())
    return f"{server}?options={quote(f'-csearch_path={schema} -csynchronous_commit=off')}"


def on_postgres(server: str, opened: list[Connection]) -> Callable[[Path | str], Connection]:
    """Return a function that opens databases by path, as SQLite does. ":memory:" is a new database each time."""

    def connect(path: Path | str) -> Connection:
        name = secrets.token_hex(8) if str(path) == ":memory:" else str(path)
        opened.append(open_postgres(schema_url(server, name)))
        return opened[-1]

    return connect
