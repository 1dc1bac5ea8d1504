"""Heartbeats of many members are written together, on SQLite and on PostgreSQL."""

import pytest

from shoal.coordinator import members
from shoal.coordinator.members import FLUSH_S, MAX_DOWNLOAD_S, HeartbeatBuffer
from shoal.coordinator.nodes import BATCH_ROWS
from shoal.protocol.messages import Heartbeat, Intake, Stats

from .support import ALICE, Harness, payload, staffed_pool

pytestmark = pytest.mark.usefixtures("every_database")
MANY = 2 * BATCH_ROWS + 3


def workers(harness: Harness) -> list[str]:
    keys = [f"{number:064x}" for number in range(MANY)]
    for number, key in enumerate(keys):
        harness.pool.db.nodes.add(key, f"w{number}", "worker", None, f"invite {number}", 0.0)
    return keys


def test_a_small_pools_heartbeat_is_recorded_at_once(harness: Harness) -> None:
    first, *_ = workers(harness)
    HeartbeatBuffer(harness.pool.db).record(harness.node(first), Heartbeat(policy_version=3))
    assert (harness.node(first).seen_s, harness.node(first).version) == (harness.clock.now_s, 3)


def test_a_large_pools_heartbeats_are_recorded_together_and_none_is_lost(harness: Harness) -> None:
    keys, beats = workers(harness), HeartbeatBuffer(harness.pool.db, immediate_per_s=0.01)
    beats.record(harness.node(keys[0]), Heartbeat())  # uses up the rate of immediate writes
    sent_s = harness.clock.now_s
    for number, key in enumerate(keys):
        beats.record(harness.node(key), Heartbeat(policy_version=None, stats=Stats(tokens=number)))
    assert {harness.node(key).seen_s for key in keys[1:]} == {0.0}, "the heartbeats were not buffered"
    harness.clock.now_s += FLUSH_S
    beats.record(harness.node(keys[0]), Heartbeat(policy_version=7))
    assert {harness.node(key).seen_s for key in keys[1:]} == {sent_s}
    assert [Stats.model_validate_json(harness.node(key).stats).tokens for key in keys[1:]] == list(range(1, MANY))
    newest = (harness.node(keys[0]).seen_s, harness.node(keys[0]).version)
    assert newest == (harness.clock.now_s, 7), "a node's newest heartbeat must count"


def test_each_download_is_recorded_once_on_the_coordinators_clock(harness: Harness) -> None:
    harness.publish(0, 1, 2)
    first, second, *_ = workers(harness)
    beats = HeartbeatBuffer(harness.pool.db)

    def take(key: str, version: int | None, ago_s: float, took_s: float = 4.0) -> None:
        intake = Intake(version=version, size_bytes=700, took_s=took_s, ago_s=ago_s)
        beats.record(harness.node(key), Heartbeat(policy_version=version, stats=Stats(intake=intake)))

    now_s = harness.clock.now_s
    take(first, None, 0.0)  # nothing was downloaded yet
    take(first, 1, 3.0)
    harness.clock.now_s += 1
    take(first, 1, 4.0)  # the same download, a second later
    take(first, 2, 0.5)
    take(first, 1, 0.0)  # reported before
    take(second, 77, 0.0)  # there is no such version
    take(second, 2, 1e12, took_s=1e12)
    rows = harness.pool.db.connection.rows("SELECT node, version, from_s, to_s, size_bytes FROM transfers ORDER BY seq")
    assert rows[:2] == [(first, 1, now_s - 7, now_s - 3, 700), (first, 2, now_s - 3.5, now_s + 0.5, 700)]
    assert [(row[0], row[1], row[3]) for row in rows[2:]] == [(second, 2, now_s + 1 - MAX_DOWNLOAD_S)]


def test_the_status_shows_download_rates_from_the_pools_own_servers_only() -> None:
    harness, urls = staffed_pool(), {}
    for number, role in enumerate(("origin", "relay", "relay", "worker")):
        urls[number] = f"http://{role}-{number}:1"
        invite = payload(f"{role}-{number}", role=role, nonce=f"{number}" * 32)
        harness.pool.members.register(f"{number}" * 64, invite, urls[number])
    harness.pool.db.nodes.move("2" * 64, "ban", "evicted by the operator", harness.clock.now_s)
    rates = {"any text": 1.0} | dict.fromkeys(urls.values(), 2.0)
    harness.pool.members.heartbeat(ALICE, Heartbeat(stats=Stats(intake=Intake(bytes_per_s=rates, size_bytes=7))))
    [intake] = [node.stats.intake for node in harness.status().nodes if node.name == "worker-a"]
    assert intake == Intake(bytes_per_s={urls[0]: 2.0, urls[1]: 2.0}, size_bytes=7)


def test_only_the_newest_downloads_are_kept(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MAX_DOWNLOADS", 3)
    for version in range(6):
        members.HeartbeatBuffer(harness.pool.db).record_downloads([("a" * 64, version, 0.0, 1.0, 5)])
    rows = harness.pool.db.connection.rows("SELECT version FROM transfers ORDER BY version")
    assert rows == [(3,), (4,), (5,)]
