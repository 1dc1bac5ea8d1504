"""Node and submission states under any sequence of events: only the tables change them, and final states are final."""

import sqlite3
from collections.abc import Sequence
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator import nodes as nodes_module
from shoal.coordinator import submissions as submissions_module
from shoal.coordinator.nodes import Nodes
from shoal.coordinator.submissions import UNSETTLED, Submission, Submissions
from shoal.ledger.connection import Connection, SqliteConnection
from shoal.protocol.messages import NodeState

NODE_EVENTS: tuple[nodes_module.Event, ...] = get_args(nodes_module.Event)
SUBMISSION_EVENTS: tuple[submissions_module.Event, ...] = get_args(submissions_module.Event)
event_sequences = st.lists(st.tuples(st.sampled_from(NODE_EVENTS), st.floats(0, 300)), max_size=40)


def tables(schema: Sequence[str]) -> Connection:
    connection = SqliteConnection(sqlite3.connect(":memory:", isolation_level=None))
    for statement in schema:
        connection.create(statement)
    return connection


# --- nodes -----------------------------------------------------------------------------------------------------------


def members() -> Nodes:
    nodes = Nodes(tables(nodes_module.SCHEMA))
    nodes.add("key", "name", "worker", None, "invite", 0.0)
    return nodes


def reachable(start: NodeState) -> set[NodeState]:
    states = {start}
    while more := {after for (before, _), after in nodes_module.TABLE.items() if before in states} - states:
        states |= more
    return states


def test_banned_is_the_only_state_without_a_way_back_to_work() -> None:
    for state in get_args(NodeState):
        assert ("active" in reachable(state)) == (state != "banned"), state
        assert "banned" in reachable(state), f"a liar that is {state} must be stoppable"
    assert not [event for (before, event) in nodes_module.TABLE if before == "banned"]


@given(event_sequences)
def test_any_sequence_follows_the_table_and_keeps_bans_and_suspensions(
    sequence: list[tuple[nodes_module.Event, float]],
) -> None:
    nodes, now_s, was_banned = members(), 0.0, False
    for event, wait_s in sequence:
        before = nodes.get("key")
        assert before is not None
        if event == "suspend":
            nodes.suspend("key", "because of suspend", now_s)
        moved = nodes.move("key", event, f"because of {event}", now_s)
        node = nodes.get("key")
        assert node is not None
        assert moved == ((before.state, event) in nodes_module.TABLE)
        assert node.reason == (f"because of {event}" if moved else before.reason)
        was_banned |= event == "ban"
        assert node.evicted == was_banned
        assert node.suspended_until_s >= before.suspended_until_s
        if moved and node.state == "active":
            assert node.suspended_until_s <= now_s, "the node became active before its suspension ended"
        now_s += wait_s


@given(event_sequences)
def test_after_anything_but_a_ban_a_worker_can_be_brought_back(
    sequence: list[tuple[nodes_module.Event, float]],
) -> None:
    nodes = members()
    for event, _ in sequence:
        if event != "ban":
            nodes.move("key", event, "", 0.0)
    for event in ("time_over", "emptied", "readmit"):  # the operator readmits it after its suspension
        nodes.move("key", event, "", 1e9)
    node = nodes.get("key")
    assert node is not None and node.state == "active"


class ChangedAfterRead(Nodes):
    """A table whose state another process changes once, right after it is read."""

    first: NodeState | None = None

    def get(self, key: str):  # type: ignore[no-untyped-def]
        node = super().get(key)
        if self.first is not None:
            first, self.first = self.first, None
            self.connection.change("UPDATE nodes SET state = ? WHERE key = ?", first, key)
        return node


def test_a_decision_on_an_old_state_is_made_again_on_the_new_one() -> None:
    nodes = ChangedAfterRead(members().connection)
    nodes.first = "banned"
    assert not nodes.move("key", "drain", "", 0.0)
    assert nodes.get("key").state == "banned"
    nodes.connection.change("UPDATE nodes SET state = 'active'")
    nodes.first = "suspended"
    assert nodes.move("key", "dismiss", "", 0.0)
    assert nodes.get("key").state == "dismissed"
    assert not nodes.move("stranger", "ban", "", 0.0)


# --- submissions -------------------------------------------------------------------------------------------------------


def added(table: Submissions, number: int = 0) -> Submission:
    made = {"step": 0, "version": 0, "digest": "d", "groups": 2, "nonce": "n", "assigned_s": 0.0, "deadline_s": 1.0}
    table.add(Submission(id=f"w-{number}", worker="w", number=number, **made))  # type: ignore[arg-type]
    return now(table, f"w-{number}")


def now(table: Submissions, id: str = "w-0") -> Submission:
    submission = table.get(id)
    assert submission is not None
    return submission


def test_settled_submissions_never_change() -> None:
    assert {before for before, _ in submissions_module.TABLE} == set(UNSETTLED)


@given(st.lists(st.sampled_from(SUBMISSION_EVENTS), max_size=12))
def test_a_submission_follows_the_table(sequence: list[submissions_module.Event]) -> None:
    submissions = Submissions(tables(submissions_module.SCHEMA))
    added(submissions)
    for number, event in enumerate(sequence):
        before = now(submissions)
        moved = submissions.move(before, event, validator=f"v-{number}")
        expected = submissions_module.TABLE.get((before.state, event))
        assert moved == (expected is not None)
        after = now(submissions)
        assert (after.state, after.validator) == (
            (expected, f"v-{number}") if moved else (before.state, before.validator)
        )


def test_a_decision_on_an_old_state_changes_nothing() -> None:
    submissions = Submissions(tables(submissions_module.SCHEMA))
    old = added(submissions)
    assert submissions.move(old, "miss")
    assert not submissions.move(old, "upload", file_hash="f" * 64)
    assert (now(submissions).state, now(submissions).file_hash) == ("expired", None)


def test_a_workers_submissions_are_dropped_by_state() -> None:
    submissions = Submissions(tables(submissions_module.SCHEMA))
    held, uploaded, judged = (added(submissions, number) for number in range(3))
    assert submissions.move(uploaded, "upload")
    assert submissions.move(judged, "upload") and submissions.move(now(submissions, "w-2"), "accept")
    submissions.drop_all("w")
    assert [now(submissions, f"w-{n}").state for n in range(3)] == ["expired", "uploaded", "accepted"]
    submissions.drop_all("w", UNSETTLED)
    assert [now(submissions, f"w-{n}").state for n in range(3)] == ["expired", "expired", "accepted"]
    assert held.state == "open"
