"""Node states under any sequence of events: `banned` is the only end, and nothing shortens a suspension."""

import sqlite3
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.nodes import SCHEMA, TABLE, Event, Nodes
from shoal.ledger.connection import SqliteConnection
from shoal.protocol.messages import NodeState

EVENTS: tuple[Event, ...] = get_args(Event)
STATES: tuple[NodeState, ...] = get_args(NodeState)
happenings = st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0, 100)), max_size=40)


def table() -> Nodes:
    nodes = Nodes(SqliteConnection(sqlite3.connect(":memory:", isolation_level=None)))
    for statement in SCHEMA:
        nodes.connection.create(statement)
    nodes.add("key", "name", "worker", None, "invite", 0.0)
    return nodes


def reachable(start: NodeState) -> set[NodeState]:
    found = {start}
    while more := {after for (before, _), after in TABLE.items() if before in found} - found:
        found |= more
    return found


def test_banned_is_the_only_state_without_a_way_back_to_work() -> None:
    for state in STATES:
        assert ("active" in reachable(state)) == (state != "banned"), state
        assert "banned" in reachable(state), f"a liar that is {state} must be stoppable"
    assert not [event for (before, event) in TABLE if before == "banned"]


def test_every_state_and_event_is_used() -> None:
    assert {state for (before, _), after in TABLE.items() for state in (before, after)} == set(STATES)
    assert {event for _, event in TABLE} == set(EVENTS)


@given(happenings)
def test_any_sequence_follows_the_table_and_keeps_bans_and_suspensions(sequence: list[tuple[Event, float]]) -> None:
    nodes, now_s, was_banned = table(), 0.0, False
    for event, length_s in sequence:
        before = nodes.get("key")
        assert before is not None
        if event == "suspend":
            nodes.suspend_until("key", now_s + length_s)
        moved = nodes.move("key", event, f"because of {event}", now_s)
        node = nodes.get("key")
        assert node is not None
        assert moved == ((before.state, event) in TABLE)
        assert node.reason == (f"because of {event}" if moved else before.reason)
        was_banned |= event == "ban"
        assert node.evicted == was_banned
        assert node.suspended_until_s >= before.suspended_until_s
        if moved and node.state == "active":
            assert node.suspended_until_s <= now_s, "no way back to work is shorter than the suspension"
        now_s += length_s / 3


@given(happenings)
def test_after_anything_but_a_ban_a_worker_can_be_brought_back(sequence: list[tuple[Event, float]]) -> None:
    nodes = table()
    for event, _ in sequence:
        if event != "ban":
            nodes.move("key", event, "", 0.0)
    for event in ("time_over", "emptied", "readmit"):  # the operator, once time has passed
        nodes.move("key", event, "", 1e9)
    node = nodes.get("key")
    assert node is not None and node.state == "active"


class Overtaken(Nodes):
    """Another process changes the state right after it was read, once."""

    first: NodeState | None = None

    def get(self, key: str):  # type: ignore[no-untyped-def]
        node = super().get(key)
        if self.first is not None:
            first, self.first = self.first, None
            self.connection.change("UPDATE nodes SET state = ? WHERE key = ?", first, key)
        return node


def test_a_decision_on_an_old_state_is_made_again_on_the_new_one() -> None:
    nodes = Overtaken(table().connection)
    nodes.first = "banned"
    assert not nodes.move("key", "drain", "", 0.0)
    assert nodes.get("key").state == "banned"
    nodes.connection.change("UPDATE nodes SET state = 'active'")
    nodes.first = "suspended"
    assert nodes.move("key", "dismiss", "", 0.0)
    assert nodes.get("key").state == "dismissed"


def test_who_is_no_member_has_no_state() -> None:
    assert not table().move("stranger", "ban", "", 0.0)


def test_a_suspension_outlives_leaving_and_returning() -> None:
    nodes = table()
    nodes.suspend_until("key", 100.0)
    for event, now_s in (("suspend", 0.0), ("drain", 1.0), ("emptied", 2.0), ("return", 3.0)):
        assert nodes.move("key", event, "", now_s)
    found = nodes.get("key")
    assert found is not None and found.state == "suspended"
