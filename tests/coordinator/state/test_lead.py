"""Two coordinators over one PostgreSQL: one leads, the other takes over, and nothing is written by both."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'shoal[postgres]'")
from shoal.coordinator.state.lead import Lead, stand_by
from shoal.ledger.connection import DatabaseLostError

from ..backends import schema_url

PATIENCE_S = 60.0


@pytest.fixture
def url(postgres: str, request: pytest.FixtureRequest) -> str:
    return schema_url(postgres, f"{request.node.name} {time.time_ns()}")


def leads(url: str, silent_s: float = PATIENCE_S) -> Lead:
    found = stand_by(url, threading.Event(), silent_s=silent_s)
    assert found is not None
    return found


class Following:
    """A second coordinator, in a thread."""

    def __init__(self, url: str, silent_s: float = PATIENCE_S) -> None:
        self.stop, self.lead = threading.Event(), None
        self.thread = threading.Thread(target=self._run, args=(url, silent_s), daemon=True)
        self.thread.start()

    def _run(self, url: str, silent_s: float) -> None:
        self.lead = stand_by(url, self.stop, silent_s=silent_s)

    def leads_within(self, wait_s: float) -> bool:
        self.thread.join(wait_s)
        return self.lead is not None


def test_only_one_leads_until_it_ends(url: str) -> None:
    first, second = leads(url), Following(url)
    assert not second.leads_within(1.5)
    first.connection.close()
    assert second.leads_within(PATIENCE_S)
    assert second.lead is not None and (first.term, second.lead.term) == (1, 2)


def test_a_follower_stops_when_it_is_told_to(url: str) -> None:
    first, second = leads(url), Following(url)
    second.stop.set()
    second.thread.join(PATIENCE_S)
    assert not second.thread.is_alive() and second.lead is None
    first.live_on()


@pytest.mark.slow
def test_a_leader_that_lives_keeps_the_lead(url: str) -> None:
    """The follower would end a leader that is silent for 3 s; this one is not."""
    first, second = leads(url), Following(url, silent_s=3.0)
    for _ in range(12):
        first.table.live_on()
        assert not second.leads_within(0.5)
    second.stop.set()


def test_a_frozen_leader_is_replaced_and_can_write_nothing_when_it_wakes(url: str) -> None:
    first, second = leads(url), Following(url, silent_s=1.0)
    first.connection.change("CREATE TABLE written (by TEXT)")
    with pytest.raises(DatabaseLostError), first.connection.transaction():
        first.connection.change("INSERT INTO written VALUES ('frozen')")
        assert second.leads_within(PATIENCE_S)  # in the midst of its transaction
        first.connection.change("INSERT INTO written VALUES ('awake')")
    assert second.lead is not None and second.lead.connection.rows("SELECT * FROM written") == []
    first.signed_s = 0
    with pytest.raises(DatabaseLostError, match="no longer leads: start it again"):
        first.live_on()


def _lead_and_hang(url: str, leading: "multiprocessing.synchronize.Event") -> None:
    lead = leads(url)
    with lead.connection.transaction():
        lead.connection.change("CREATE TABLE half (done BOOLEAN)")
        leading.set()
        time.sleep(PATIENCE_S)


@pytest.fixture
def killed(url: str) -> Iterator[None]:
    """A coordinator that was killed -9 in the midst of a transaction."""
    context = multiprocessing.get_context("fork")
    leading = context.Event()
    process = context.Process(target=_lead_and_hang, args=(url, leading))
    process.start()
    assert leading.wait(PATIENCE_S) and process.pid
    os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE_S)
    yield


def test_after_kill_9_the_other_leads_and_half_a_transaction_is_gone(url: str, killed: None) -> None:
    lead = leads(url)
    assert lead.term == 2 and not lead.connection.has_table("half")
