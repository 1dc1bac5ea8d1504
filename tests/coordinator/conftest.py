from collections.abc import Iterator

import pytest

from shoal.ledger.connection import Connection

from ..servers import postgres_server
from . import support
from .support import Harness, staffed_pool


@pytest.fixture
def harness() -> Harness:
    """Return a pool with two workers, two validators and version 0."""
    return staffed_pool()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Yield the URL of a PostgreSQL server for all tests of this session."""
    with postgres_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def every_database(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run the test once on each database."""
    yield from _on_database(request, monkeypatch)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def every_database_slow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run the test once on each database. On PostgreSQL the test counts as slow, because its module has many tests."""
    yield from _on_database(request, monkeypatch)


def _on_database(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    opened: list[Connection] = []
    if request.param == "postgres":
        server = request.getfixturevalue("postgres")
        from .backends import on_postgres

        monkeypatch.setattr(support, "connect", on_postgres(server, opened))
    yield request.param
    for connection in opened:
        connection.close()
