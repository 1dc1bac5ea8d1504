"""Who belongs to the pool, and the heartbeats by which they show that they live and ask for work.

Invariant: an invite makes one key a member, once, with one role and one name.
Called by the coordinator's routes. Left out: trust scores, members that leave.
"""

from typing import Literal

from shoal.config import Config
from shoal.coordinator.assignments import Assignments
from shoal.coordinator.database import Database, PoolError
from shoal.protocol.messages import Heartbeat, HeartbeatAnswer, InvitePayload, Registered, Role


class Members:
    def __init__(self, db: Database, config: Config, assignments: Assignments) -> None:
        self.db = db
        self.config = config
        self.assignments = assignments

    def register(self, key: str, invite: InvitePayload, url: str | None) -> Registered:
        """Spend an invite. The same key with the same invite may come again (a restart), with a new address."""
        with self.db.transaction():
            node = self.db.one("SELECT * FROM nodes WHERE key = ?", key)
            if node is not None:
                if node["invite"] != invite.nonce:
                    raise PoolError(f"this key is already registered as {node['name']}")
                self.db.change("UPDATE nodes SET url = ? WHERE key = ?", url, key)
                return Registered(name=node["name"], role=node["role"])
            if self.db.clock() > invite.expires_s:
                raise PoolError("the invite has expired; ask for a new one", 403)
            if self.db.one("SELECT 1 FROM nodes WHERE invite = ? OR name = ?", invite.nonce, invite.name):
                raise PoolError(f"the invite for {invite.name} was used by another key; ask for a new one", 403)
            self.db.change(
                "INSERT INTO nodes (key, name, role, url, invite, seen_s) VALUES (?, ?, ?, ?, ?, ?)",
                key,
                invite.name,
                invite.role,
                url,
                invite.nonce,
                self.db.clock(),
            )
            self.db.ledger.append("registered", {"key": key, "name": invite.name, "role": invite.role})
        return Registered(name=invite.name, role=invite.role)

    def role(self, key: str) -> Role | None:
        """The role of a registered key, None for a stranger."""
        node = self.db.one("SELECT role FROM nodes WHERE key = ?", key)
        return node["role"] if node else None

    def keys(self) -> dict[Role, list[str]]:
        """Registered keys of every role but workers."""
        found: dict[Role, list[str]] = {}
        for node in self.db.all("SELECT key, role FROM nodes WHERE role != 'worker' AND NOT evicted ORDER BY rowid"):
            found.setdefault(node["role"], []).append(node["key"])
        return found

    def heartbeat(self, key: str, beat: Heartbeat) -> HeartbeatAnswer:
        """Note that a node lives; hand a worker that wants one its next task."""
        with self.db.transaction():
            self.db.change(
                "UPDATE nodes SET seen_s = ?, version = ?, stats = ? WHERE key = ?",
                self.db.clock(),
                beat.policy_version,
                beat.stats.model_dump_json(),
                key,
            )
            node = self.db.one("SELECT * FROM nodes WHERE key = ?", key)
            relays = self.db.all("SELECT url FROM nodes WHERE role = 'relay' AND url IS NOT NULL AND NOT evicted")
            answer = HeartbeatAnswer(
                state="evicted" if node["evicted"] else self._state_for(node["role"]),
                newest_version=self.db.newest(),
                relays=[relay["url"] for relay in relays],
                banned=self._evicted() if node["role"] in ("origin", "relay") else [],
            )
            if not beat.wants_task or answer.state != "running" or node["role"] != "worker":
                return answer
            outcome = self.assignments.assign(key, beat.policy_version)
        if isinstance(outcome, str):
            return answer.model_copy(update={"waiting_for": outcome})
        return answer.model_copy(update={"assignment": outcome})

    def _evicted(self) -> list[str]:
        return [node["key"] for node in self.db.all("SELECT key FROM nodes WHERE evicted ORDER BY rowid")]

    def _state_for(self, role: str) -> Literal["running", "finished"]:
        """Workers, validators and the learner end with the last version; who serves or evaluates it ends after that."""
        if role in ("worker", "validator", "learner"):
            return "finished" if self.db.newest() == self.config.run.steps else "running"
        return "finished" if self.db.evaluated_last(self.config.run.steps) else "running"
