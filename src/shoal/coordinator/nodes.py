"""The table of registered nodes, and the state machine of a member: (state, event) -> state.

    active      gets tasks                           dismissed  statistical evidence against it; the operator may readmit it
    suspended   no tasks until a given time          left       has no tasks; may return
    draining    no new tasks; finishes those it has  banned     slashed, or evicted by the operator; may do nothing

    return      the same key registers again with its old invite, after it left or was killed while draining. It keeps
                its open tasks, its rest before the next task and its suspension, so it gains nothing by leaving

A node without recent heartbeats (`seen_s`) counts as gone, but keeps its state. Its next heartbeat brings it back.

A suspension lasts base_s * 2 ^ (previous suspensions), at most MAX_SUSPENSION_S, by the coordinator's clock, and ends
by itself. It lengthens later suspensions until FORGET_S after its end. A suspended key keeps its membership, its open
task and its credit. A draining or departed key serves its suspension when it returns.

Invariants: a key, a name and an invite each occur once. A (state, event) pair that is not in the table changes nothing.
Only `banned` is final. No way back to `active` shortens a suspension, not even leaving and returning. Only `move`
writes the state, by compare-and-swap, so two processes cannot both act on one state. A suspension is based on the
coordinator's own observations and slashes nobody: a mistaken one costs only time.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from shoal.ledger.connection import SERIAL, Connection
from shoal.protocol.messages import NodeState, Role

SCHEMA = [
    f"""CREATE TABLE IF NOT EXISTS nodes (
    seq {SERIAL}, key TEXT UNIQUE NOT NULL, name TEXT UNIQUE NOT NULL, role TEXT NOT NULL, url TEXT,
    invite TEXT UNIQUE NOT NULL, seen_s DOUBLE PRECISION NOT NULL, version BIGINT, stats TEXT NOT NULL DEFAULT '{{}}',
    capability TEXT NOT NULL DEFAULT '{{}}', state TEXT NOT NULL DEFAULT 'active', reason TEXT NOT NULL DEFAULT '',
    state_s DOUBLE PRECISION NOT NULL DEFAULT 0, suspended_until_s DOUBLE PRECISION NOT NULL DEFAULT 0,
    suspensions BIGINT NOT NULL DEFAULT 0, took_s DOUBLE PRECISION NOT NULL DEFAULT 0,
    size BIGINT NOT NULL DEFAULT 0, missed DOUBLE PRECISION NOT NULL DEFAULT 0, missed_in_a_row BIGINT NOT NULL DEFAULT 0,
    rests_until_s DOUBLE PRECISION NOT NULL DEFAULT 0, staked BIGINT NOT NULL DEFAULT 0)""",
    "CREATE INDEX IF NOT EXISTS nodes_role ON nodes (role, seq)",  # each heartbeat lists the relays
    "CREATE INDEX IF NOT EXISTS nodes_banned ON nodes (seq) WHERE state = 'banned'",
    "CREATE INDEX IF NOT EXISTS nodes_took ON nodes (took_s) WHERE took_s > 0",
]
BATCH_ROWS = 64  # rows per statement
BEAT = "(CAST(? AS TEXT), CAST(? AS DOUBLE PRECISION), CAST(? AS BIGINT), CAST(? AS TEXT))"
SETTABLE = {
    *("url", "capability", "staked", "size"),
    *("took_s", "missed", "missed_in_a_row", "rests_until_s"),
}
FIRST_SUSPENSION_S = 60.0
MAX_SUSPENSION_S = 4 * 3600.0
FORGET_S = 24 * 3600.0  # how long after its end a suspension still lengthens later ones
TIMEOUT_S = 30.0  # how long a node without heartbeats still counts as live

Event = Literal["suspend", "time_over", "drain", "emptied", "return", "dismiss", "readmit", "ban"]

TABLE: dict[tuple[NodeState, Event], NodeState] = {
    ("active", "suspend"): "suspended",
    ("active", "drain"): "draining",
    ("active", "dismiss"): "dismissed",
    ("active", "ban"): "banned",
    ("suspended", "suspend"): "suspended",
    ("suspended", "time_over"): "active",
    ("suspended", "drain"): "draining",
    ("suspended", "dismiss"): "dismissed",
    ("suspended", "ban"): "banned",
    ("draining", "emptied"): "left",
    ("draining", "return"): "active",
    ("draining", "readmit"): "active",
    ("draining", "dismiss"): "dismissed",
    ("draining", "ban"): "banned",
    ("left", "return"): "active",
    ("left", "readmit"): "active",
    ("left", "dismiss"): "dismissed",
    ("left", "ban"): "banned",
    ("dismissed", "readmit"): "active",
    ("dismissed", "ban"): "banned",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member:
    key: str
    name: str
    role: Role
    url: str | None
    invite: str  # the invite's nonce; for an open invite, followed by a space and the key
    seen_s: float
    version: int | None
    stats: str  # JSON of messages.Stats
    state: NodeState  # see TABLE
    reason: str  # why it is in this state
    state_s: float  # when it entered this state
    suspended_until_s: float  # by the coordinator's clock; 0 or in the past: not suspended
    suspensions: int  # number of suspensions that still lengthen later ones
    took_s: float  # recent average time from task to upload; 0: no accepted work yet
    size: int  # groups in its usual task; 0: it is new
    capability: str  # JSON of messages.Capability
    missed: float  # recent share of missed tasks
    missed_in_a_row: int
    rests_until_s: float  # gets no task before this time
    staked: int  # its stake in the contract, as last read

    @property
    def evicted(self) -> bool:
        """Whether it was slashed, or evicted by the operator."""
        return self.state == "banned"

    def suspended_s(self, now_s: float) -> float:
        """Return the seconds until it gets tasks again; 0 if it is not suspended."""
        return max(self.suspended_until_s - now_s, 0.0) if self.state == "suspended" else 0.0

    @property
    def joined_by_stake(self) -> bool:
        """Whether it joined with an open invite. Then `invite` includes the key."""
        return " " in self.invite


COLUMNS = ", ".join(field.name for field in fields(Member))


def next_state(node: Member, event: Event, now_s: float) -> NodeState | None:
    """Return the state after an event; None if the event changes nothing."""
    target = TABLE.get((node.state, event))
    return "suspended" if target == "active" and node.suspended_until_s > now_s else target


class Nodes:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.timeout_s = TIMEOUT_S

    def get(self, key: str) -> Member | None:
        row = self.connection.row(f"SELECT {COLUMNS} FROM nodes WHERE key = ?", key)
        return None if row is None else Member(*row)

    def name(self, key: str) -> str:
        """Return the node's name for logs; for an unknown key, its first characters."""
        node = self.get(key)
        return node.name if node else key[:16]

    def all(self) -> list[Member]:
        """Return all nodes, by role, then name."""
        return [Member(*row) for row in self.connection.rows(f"SELECT {COLUMNS} FROM nodes ORDER BY role, name")]

    def add(self, key: str, name: str, role: Role, url: str | None, invite: str, seen_s: float) -> None:
        self.connection.change(
            "INSERT INTO nodes (key, name, role, url, invite, seen_s) VALUES (?, ?, ?, ?, ?, ?)",
            *(key, name, role, url, invite, seen_s),
        )

    def is_used(self, invite: str) -> bool:
        return self.connection.row("SELECT 1 FROM nodes WHERE invite = ?", invite) is not None

    def is_taken(self, name: str) -> bool:
        return self.connection.row("SELECT 1 FROM nodes WHERE name = ?", name) is not None

    def live_workers(self, now_s: float) -> list[Member]:
        """Return the live workers that have not left and were not excluded."""
        rows = self.connection.rows(
            f"SELECT {COLUMNS} FROM nodes WHERE role = 'worker' AND state NOT IN ('left', 'dismissed', 'banned')"
            " AND seen_s >= ?",
            now_s - self.timeout_s,
        )
        return [Member(*row) for row in rows]

    def set(self, key: str, **values: object) -> None:
        """Write columns of one node. Its state changes through `move` only."""
        assert values.keys() <= SETTABLE
        columns = ", ".join(f"{name} = ?" for name in values)
        self.connection.change(f"UPDATE nodes SET {columns} WHERE key = ?", *values.values(), key)

    def beat_all(self, beats: Sequence[tuple[str, float, int | None, str]]) -> None:
        """Record heartbeats of different nodes: key, time, version, stats."""
        whole = len(beats) - len(beats) % BATCH_ROWS  # so the statement has only two forms, and both stay prepared
        for first in range(0, whole, BATCH_ROWS):
            self._beat(beats[first : first + BATCH_ROWS])
        for beat in beats[whole:]:
            self._beat([beat])

    def _beat(self, beats: Sequence[tuple[str, float, int | None, str]]) -> None:
        self.connection.change(
            "UPDATE nodes SET seen_s = new.column2, version = new.column3, stats = new.column4"
            f" FROM (VALUES {', '.join([BEAT] * len(beats))}) AS new WHERE nodes.key = new.column1",
            *(part for beat in beats for part in beat),
        )

    # --- what a member may do ----------------------------------------------------------------------------------------

    def move(self, key: str, event: Event, reason: str, now_s: float) -> bool:
        """Apply an event to a member. Return False if the member is unknown or the event changes nothing."""
        while (node := self.get(key)) is not None and (target := next_state(node, event, now_s)) is not None:
            moved = self.connection.change(
                "UPDATE nodes SET state = ?, reason = ?, state_s = ? WHERE key = ? AND state = ?",
                *(target, reason, now_s, key, node.state),
            )
            if moved:
                return True
        return False

    def suspend(self, key: str, reason: str, now_s: float) -> float:
        """Suspend a key for twice as long as last time. Never shorten a suspension. Return the end time."""
        with self.connection.transaction():
            node = self.get(key)
            before = 0 if node is None else node.suspensions
            if node is not None and before and now_s - node.suspended_until_s > FORGET_S:
                self.connection.change("UPDATE nodes SET suspensions = 0 WHERE key = ?", key)
                before = 0
            length_s = min(FIRST_SUSPENSION_S * 2.0 ** min(before, 60), MAX_SUSPENSION_S)
            until_s = now_s + length_s
            self.connection.change(
                "UPDATE nodes SET suspensions = suspensions + 1,"
                " suspended_until_s = CASE WHEN suspended_until_s > ? THEN suspended_until_s ELSE ? END WHERE key = ?",
                *(until_s, until_s, key),
            )
            self.move(key, "suspend", reason, now_s)
        log.info("%s suspended for %.0f s: %s", self.name(key), length_s, reason)
        return until_s

    # --- live nodes ---------------------------------------------------------------------------------------------------

    def times_taken(self) -> list[float]:
        """Return each proven worker's seconds from task to upload, in ascending order."""
        rows = self.connection.rows("SELECT took_s FROM nodes WHERE took_s > 0 AND state != 'banned' ORDER BY took_s")
        return [took_s for (took_s,) in rows]

    def has_proven_worker(self, now_s: float) -> bool:
        """Return whether a worker with accepted work is live and active."""
        row = self.connection.row(
            "SELECT 1 FROM nodes WHERE took_s > 0 AND seen_s >= ? AND state = 'active' LIMIT 1",
            now_s - self.timeout_s,
        )
        return row is not None

    def evicted_keys(self) -> list[str]:
        return [key for (key,) in self.connection.rows("SELECT key FROM nodes WHERE state = 'banned' ORDER BY seq")]

    def trusted_keys(self) -> list[tuple[Role, str]]:
        """Return the role and key of every node that is neither a worker nor evicted, in order of registration."""
        return self.connection.rows(
            "SELECT role, key FROM nodes WHERE role != 'worker' AND state != 'banned' ORDER BY seq"
        )

    def live_validators(self, now_s: float) -> list[str]:
        """Return the keys of live validators that are not evicted, in order of registration."""
        rows = self.connection.rows(
            "SELECT key FROM nodes WHERE role = 'validator' AND seen_s >= ? AND state != 'banned' ORDER BY seq",
            now_s - self.timeout_s,
        )
        return [key for (key,) in rows]

    def servers(self, now_s: float) -> list[Member]:
        """Return the origins and the live relays that are not evicted."""
        rows = self.connection.rows(
            f"SELECT {COLUMNS} FROM nodes WHERE state != 'banned'"
            " AND (role = 'origin' OR role = 'relay' AND seen_s >= ?) ORDER BY seq",
            now_s - self.timeout_s,
        )
        return [Member(*row) for row in rows]

    def relay_urls(self) -> list[str]:
        rows = self.connection.rows(
            "SELECT url FROM nodes WHERE role = 'relay' AND url IS NOT NULL AND state != 'banned' ORDER BY seq"
        )
        return [url for (url,) in rows]
