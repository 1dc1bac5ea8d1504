"""Heartbeats of many members are written together, on SQLite and on PostgreSQL."""

import pytest

from shoal.coordinator.membership.beats import TOGETHER_S, Beats
from shoal.coordinator.tables.nodes import TOGETHER, Node
from shoal.protocol.messages import Heartbeat, Stats

from ..support import Harness

pytestmark = pytest.mark.usefixtures("every_database")
MANY = 2 * TOGETHER + 3


def workers(harness: Harness) -> list[str]:
    keys = [f"{number:064x}" for number in range(MANY)]
    for number, key in enumerate(keys):
        harness.pool.db.nodes.add(key, f"w{number}", "worker", None, f"invite {number}", 0.0)
    return keys


def of(harness: Harness, key: str) -> Node:
    found = harness.pool.db.nodes.get(key)
    assert found is not None
    return found


def test_a_small_pools_heartbeat_is_recorded_at_once(harness: Harness) -> None:
    first, *_ = workers(harness)
    Beats(harness.pool.db).take(of(harness, first), Heartbeat(policy_version=3))
    assert (of(harness, first).seen_s, of(harness, first).version) == (harness.clock.now_s, 3)


def test_a_large_pools_heartbeats_are_recorded_together_and_none_is_lost(harness: Harness) -> None:
    keys, beats = workers(harness), Beats(harness.pool.db, at_once_per_s=0.01)
    beats.take(of(harness, keys[0]), Heartbeat())  # takes the pool beyond its rate
    begun_s = harness.clock.now_s
    for number, key in enumerate(keys):
        beats.take(of(harness, key), Heartbeat(policy_version=None, stats=Stats(tokens=number)))
    assert {of(harness, key).seen_s for key in keys[1:]} == {0.0}, "they wait for each other"
    harness.clock.now_s += TOGETHER_S
    beats.take(of(harness, keys[0]), Heartbeat(policy_version=7))
    assert {of(harness, key).seen_s for key in keys[1:]} == {begun_s}
    assert [Stats.model_validate_json(of(harness, key).stats).tokens for key in keys[1:]] == list(range(1, MANY))
    assert (of(harness, keys[0]).seen_s, of(harness, keys[0]).version) == (harness.clock.now_s, 7), "the newest counts"
