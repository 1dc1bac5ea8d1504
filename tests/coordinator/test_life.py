"""A submission's states under any sequence of events: only the table moves it, and what is settled stays so."""

import sqlite3
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.submissions import SCHEMA, TABLE, UNSETTLED, Event, State, Submission, Submissions
from shoal.ledger.connection import SqliteConnection

EVENTS: tuple[Event, ...] = get_args(Event)
STATES: tuple[State, ...] = get_args(State)


def table() -> Submissions:
    found = Submissions(SqliteConnection(sqlite3.connect(":memory:", isolation_level=None)))
    for statement in SCHEMA:
        found.connection.create(statement)
    return found


def added(table: Submissions, number: int = 0) -> Submission:
    made = {"step": 0, "version": 0, "digest": "d", "groups": 2, "nonce": "n", "assigned_s": 0.0, "deadline_s": 1.0}
    table.add(Submission(id=f"w-{number}", worker="w", number=number, **made))  # type: ignore[arg-type]
    return now(table, f"w-{number}")


def now(table: Submissions, id: str = "w-0") -> Submission:
    found = table.get(id)
    assert found is not None
    return found


def test_every_state_and_event_is_used_and_what_is_settled_stays_so() -> None:
    assert {state for (before, _), after in TABLE.items() for state in (before, after)} == set(STATES)
    assert {event for _, event in TABLE} == set(EVENTS)
    assert {before for before, _ in TABLE} == set(UNSETTLED)


@given(st.lists(st.sampled_from(EVENTS), max_size=12))
def test_any_sequence_follows_the_table(sequence: list[Event]) -> None:
    submissions = table()
    added(submissions)
    for number, event in enumerate(sequence):
        before = now(submissions)
        moved = submissions.move(before, event, validator=f"v-{number}")
        expected = TABLE.get((before.state, event))
        assert moved == (expected is not None)
        after = now(submissions)
        assert (after.state, after.validator) == (
            (expected, f"v-{number}") if moved else (before.state, before.validator)
        )


def test_a_decision_on_an_old_state_changes_nothing() -> None:
    submissions = table()
    old = added(submissions)
    assert submissions.move(old, "miss")
    assert not submissions.move(old, "upload", file_hash="f" * 64)
    assert (now(submissions).state, now(submissions).file_hash) == ("expired", None)


def test_an_event_brings_no_column_but_its_own() -> None:
    submissions = table()
    found = added(submissions)
    for column in ("state", "worker", "credit", "tokens"):
        with pytest.raises(AssertionError):
            submissions.move(found, "upload", **{column: "x"})


def test_what_a_worker_has_is_dropped_by_its_state() -> None:
    submissions = table()
    held, uploaded, judged = (added(submissions, number) for number in range(3))
    assert submissions.move(uploaded, "upload")
    assert submissions.move(judged, "upload") and submissions.move(now(submissions, "w-2"), "accept")
    submissions.drop_of("w")
    assert [now(submissions, f"w-{n}").state for n in range(3)] == ["expired", "uploaded", "accepted"]
    submissions.drop_of("w", UNSETTLED)
    assert [now(submissions, f"w-{n}").state for n in range(3)] == ["expired", "expired", "accepted"]
    assert held.state == "open"
