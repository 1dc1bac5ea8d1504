"""The table of registered nodes: key, role, address, last heartbeat, state, and how it did with its tasks.

Invariant: a key, a name and an invite each occur once; a state changes only from the one that the caller names, and only
`states.move` calls that. Called by `members`, `states`, `suspension`, `arrivals`, `status` and `metrics`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from shoal.coordinator.tables.connection import SERIAL, Connection
from shoal.protocol.messages import NodeState, Role

SCHEMA = [
    f"""CREATE TABLE IF NOT EXISTS nodes (
    seq {SERIAL}, key TEXT UNIQUE NOT NULL, name TEXT UNIQUE NOT NULL, role TEXT NOT NULL, url TEXT,
    invite TEXT UNIQUE NOT NULL, seen_s DOUBLE PRECISION NOT NULL, version BIGINT, stats TEXT NOT NULL DEFAULT '{{}}',
    capability TEXT NOT NULL DEFAULT '{{}}', state TEXT NOT NULL DEFAULT 'active', reason TEXT NOT NULL DEFAULT '',
    state_s DOUBLE PRECISION NOT NULL DEFAULT 0, suspended_until_s DOUBLE PRECISION NOT NULL DEFAULT 0,
    suspensions BIGINT NOT NULL DEFAULT 0, took_s DOUBLE PRECISION NOT NULL DEFAULT 0,
    size BIGINT NOT NULL DEFAULT 0, tokens_per_s DOUBLE PRECISION NOT NULL DEFAULT 0, speeds BIGINT NOT NULL DEFAULT 0,
    missed DOUBLE PRECISION NOT NULL DEFAULT 0, missed_in_a_row BIGINT NOT NULL DEFAULT 0,
    rests_until_s DOUBLE PRECISION NOT NULL DEFAULT 0, staked BIGINT NOT NULL DEFAULT 0)""",
    "CREATE INDEX IF NOT EXISTS nodes_role ON nodes (role, seq)",  # each heartbeat asks for the relays among all workers
    "CREATE INDEX IF NOT EXISTS nodes_banned ON nodes (seq) WHERE state = 'banned'",
    "CREATE INDEX IF NOT EXISTS nodes_took ON nodes (took_s) WHERE took_s > 0",
]
TOGETHER = 64  # rows in one statement
BEAT = "(CAST(? AS TEXT), CAST(? AS DOUBLE PRECISION), CAST(? AS BIGINT), CAST(? AS TEXT))"


@dataclass(frozen=True)
class Node:
    key: str
    name: str
    role: Role
    url: str | None
    invite: str  # its nonce
    seen_s: float
    version: int | None
    stats: str  # JSON of messages.Stats
    state: NodeState  # see `states`
    reason: str  # for its state
    state_s: float  # since when
    suspended_until_s: float  # by the coordinator's clock; in the past or 0: nothing is left of it
    suspensions: int  # in a row, none of them forgotten
    took_s: float  # from a task to its upload, lately; 0: nothing of it was accepted yet
    size: int  # groups in its usual task; 0: a newcomer's
    tokens_per_s: float  # measured, lately
    speeds: int  # tasks that it was measured in
    capability: str  # JSON of messages.Capability
    missed: float  # recent share of its tasks that it never uploaded
    missed_in_a_row: int
    rests_until_s: float  # no new task before
    staked: int  # in a contract, when it was last read

    @property
    def evicted(self) -> bool:
        """Slashed, or evicted by the operator: no route answers it any more."""
        return self.state == "banned"

    @property
    def joined_by_stake(self) -> bool:
        """With an open invite, whose entry names the key too."""
        return " " in self.invite


COLUMNS = ", ".join(field.name for field in fields(Node))


class Nodes:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def get(self, key: str) -> Node | None:
        row = self.connection.row(f"SELECT {COLUMNS} FROM nodes WHERE key = ?", key)
        return None if row is None else Node(*row)

    def all(self) -> list[Node]:
        """By role, then name."""
        return [Node(*row) for row in self.connection.rows(f"SELECT {COLUMNS} FROM nodes ORDER BY role, name")]

    def add(self, key: str, name: str, role: Role, url: str | None, invite: str, seen_s: float) -> None:
        self.connection.change(
            "INSERT INTO nodes (key, name, role, url, invite, seen_s) VALUES (?, ?, ?, ?, ?, ?)",
            key,
            name,
            role,
            url,
            invite,
            seen_s,
        )

    def is_taken(self, invite: str, name: str) -> bool:
        return self.connection.row("SELECT 1 FROM nodes WHERE invite = ? OR name = ?", invite, name) is not None

    def count_workers(self, seen_after_s: float) -> int:
        """Those that may work and gave a sign of life since then."""
        return int(
            self.connection.value(
                "SELECT count(*) FROM nodes WHERE role = 'worker' AND state NOT IN ('left', 'dismissed', 'banned')"
                " AND seen_s >= ?",
                seen_after_s,
            )
        )

    def set_url(self, key: str, url: str | None) -> None:
        self.connection.change("UPDATE nodes SET url = ? WHERE key = ?", url, key)

    def beat_all(self, beats: Sequence[tuple[str, float, int | None, str]]) -> None:
        """Record heartbeats of different nodes: key, when it was seen, version, stats."""
        whole = len(beats) - len(beats) % TOGETHER  # few forms of one statement: each is kept prepared
        for first in range(0, whole, TOGETHER):
            self._beat(beats[first : first + TOGETHER])
        for beat in beats[whole:]:
            self._beat([beat])

    def _beat(self, beats: Sequence[tuple[str, float, int | None, str]]) -> None:
        self.connection.change(
            "UPDATE nodes SET seen_s = new.column2, version = new.column3, stats = new.column4"
            f" FROM (VALUES {', '.join([BEAT] * len(beats))}) AS new WHERE nodes.key = new.column1",
            *(part for beat in beats for part in beat),
        )

    def change_state(self, key: str, before: NodeState, state: NodeState, reason: str, now_s: float) -> bool:
        """False, and nothing changes, if the state is not `before` any more. Only `states.move` calls it."""
        return (
            self.connection.change(
                "UPDATE nodes SET state = ?, reason = ?, state_s = ? WHERE key = ? AND state = ?",
                *(state, reason, now_s, key, before),
            )
            == 1
        )

    def suspend_until(self, key: str, until_s: float) -> None:
        """Count one suspension. It never shortens an earlier one. Call `suspension.suspend`, which changes the state too."""
        self.connection.change(
            "UPDATE nodes SET suspensions = suspensions + 1,"
            " suspended_until_s = CASE WHEN suspended_until_s > ? THEN suspended_until_s ELSE ? END WHERE key = ?",
            *(until_s, until_s, key),
        )

    def forget_suspensions(self, key: str) -> None:
        """The next one counts as the first."""
        self.connection.change("UPDATE nodes SET suspensions = 0 WHERE key = ?", key)

    def set_record(self, key: str, *, took_s: float, missed: float, missed_in_a_row: int, rests_until_s: float) -> None:
        """How the worker did with its tasks (see `arrivals`)."""
        self.connection.change(
            "UPDATE nodes SET took_s = ?, missed = ?, missed_in_a_row = ?, rests_until_s = ? WHERE key = ?",
            *(took_s, missed, missed_in_a_row, rests_until_s, key),
        )

    def set_speed(self, key: str, tokens_per_s: float, speeds: int) -> None:
        self.connection.change("UPDATE nodes SET tokens_per_s = ?, speeds = ? WHERE key = ?", tokens_per_s, speeds, key)

    def set_capability(self, key: str, capability: str) -> None:
        self.connection.change("UPDATE nodes SET capability = ? WHERE key = ?", capability, key)

    def set_staked(self, key: str, amount: int) -> None:
        self.connection.change("UPDATE nodes SET staked = ? WHERE key = ?", amount, key)

    def set_size(self, key: str, size: int) -> None:
        self.connection.change("UPDATE nodes SET size = ? WHERE key = ?", size, key)

    def times_taken(self) -> list[float]:
        """Seconds from a task to its upload of each worker whose work was accepted, in order."""
        rows = self.connection.rows("SELECT took_s FROM nodes WHERE took_s > 0 AND state != 'banned' ORDER BY took_s")
        return [took_s for (took_s,) in rows]

    def has_proven_worker(self, seen_since_s: float) -> bool:
        """Whether a worker with accepted work was seen since then and gets tasks."""
        found = self.connection.row(
            "SELECT 1 FROM nodes WHERE took_s > 0 AND seen_s >= ? AND state = 'active' LIMIT 1", seen_since_s
        )
        return found is not None

    def evicted_keys(self) -> list[str]:
        return [key for (key,) in self.connection.rows("SELECT key FROM nodes WHERE state = 'banned' ORDER BY seq")]

    def trusted_keys(self) -> list[tuple[Role, str]]:
        """Role and key of every node that is neither a worker nor evicted, in order of registration."""
        return [
            (role, key)
            for role, key in self.connection.rows(
                "SELECT role, key FROM nodes WHERE role != 'worker' AND state != 'banned' ORDER BY seq"
            )
        ]

    def live_keys(self, role: Role, seen_since_s: float) -> list[str]:
        """Keys of this role that were seen since then and are not evicted, in order of registration."""
        rows = self.connection.rows(
            "SELECT key FROM nodes WHERE role = ? AND seen_s >= ? AND state != 'banned' ORDER BY seq",
            role,
            seen_since_s,
        )
        return [key for (key,) in rows]

    def relay_urls(self) -> list[str]:
        rows = self.connection.rows(
            "SELECT url FROM nodes WHERE role = 'relay' AND url IS NOT NULL AND state != 'banned' ORDER BY seq"
        )
        return [url for (url,) in rows]
