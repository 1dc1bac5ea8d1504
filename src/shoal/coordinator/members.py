"""Membership: registration with an invite, and heartbeats, by which nodes stay live and workers get tasks.

Invariant: an invite makes one key a member, once, with one role and one name.
Called by the coordinator's routes. What a member may do is in `states`.
"""

import logging
from typing import Literal
from urllib.parse import urlsplit

from shoal.config import Config
from shoal.coordinator import states
from shoal.coordinator.assignments import Assignments
from shoal.coordinator.classes import Classes
from shoal.coordinator.database import Database, PoolError
from shoal.coordinator.tables.nodes import Node
from shoal.protocol.address import AddressError, coordinator_url
from shoal.protocol.messages import Heartbeat, HeartbeatAnswer, InvitePayload, Registered, Role
from shoal.shardcast.fetch.reach import OutOfReach, check_host
from shoal.shardcast.serve.rates import Rates

RECORDS_PER_S = 4.0  # of one node's heartbeats, with a burst of 10 s; an honest node beats once a second

log = logging.getLogger(__name__)


class Members:
    def __init__(self, db: Database, config: Config, assignments: Assignments, classes: Classes) -> None:
        self.db = db
        self.config = config
        self.assignments = assignments
        self.classes = classes
        self._records = Rates(RECORDS_PER_S)

    def may_register(self, key: str, invite: InvitePayload) -> None:
        """Raise PoolError unless this invite lets this key in. Changes nothing."""
        node = self.db.nodes.get(key)
        if node is not None:
            if node.invite != invite.nonce:
                raise PoolError(f"this key is already registered as {node.name}")
            return
        if self.db.clock() > invite.expires_s:
            raise PoolError("the invite has expired; ask for a new one", 403)
        if self.db.nodes.is_taken(invite.nonce, invite.name):
            raise PoolError(f"the invite for {invite.name} was used by another key; ask for a new one", 403)

    def register(self, key: str, invite: InvitePayload, url: str | None) -> Registered:
        """Spend an invite. The same key may repeat the same invite (a restart), with a new address."""
        if url is not None:
            self._check_url(url)
        with self.db.transaction():
            self.may_register(key, invite)
            node = self.db.nodes.get(key)
            if node is not None:
                self.db.nodes.set_url(key, url)
                states.move(self.db.nodes, key, "return", "it came back", self.db.clock())
                return Registered(name=node.name, role=node.role)
            self.db.nodes.add(key, invite.name, invite.role, url, invite.nonce, self.db.clock())
            self.db.ledger.append("registered", {"key": key, "name": invite.name, "role": invite.role})
        log.info("%s joined as %s, key %s", invite.name, invite.role, key[:16])
        return Registered(name=invite.name, role=invite.role)

    def _check_url(self, url: str) -> None:
        """Every node of the run connects to what relays announce, so nobody may send them into their own networks."""
        try:
            check_host(urlsplit(coordinator_url(url)).hostname or "", self.config.reach)
        except AddressError as error:
            raise PoolError(f"cannot announce {url[:80]!r}: a server's URL is http://HOST:PORT", 400) from error
        except OutOfReach as error:
            raise PoolError(f"cannot announce {url[:80]!r}: {error}", 400) from error

    def role(self, key: str) -> Role | None:
        """The role of a registered key, None for a stranger."""
        node = self.db.nodes.get(key)
        return node.role if node else None

    def keys(self) -> dict[Role, list[str]]:
        """Registered keys of every role except workers."""
        found: dict[Role, list[str]] = {}
        for role, key in self.db.nodes.trusted_keys():
            found.setdefault(role, []).append(key)
        return found

    def heartbeat(self, key: str, beat: Heartbeat) -> HeartbeatAnswer:
        """Record that a registered node lives; give a worker that wants one its next task."""
        with self.db.transaction():
            node = self._now(key)
            self._record(node, beat)
            self.classes.report(key, beat)
            if beat.finished is not None and node.role == "worker":
                self.assignments.finished(key, beat.finished)
            answer = HeartbeatAnswer(
                state=self._state_for(node),
                newest_version=self.db.policies.newest(),
                relays=self.db.nodes.relay_urls(),
                banned=self.db.nodes.evicted_keys() if node.role in ("origin", "relay") else [],
                renewals=self.classes.renewals(key),
            )
            if not beat.wants_task or answer.state != "running" or node.role != "worker":
                return answer
            if why := self.classes.why_no_task(key):
                return answer.model_copy(update={"waiting_for": why})
            outcome = self.assignments.assign(key, beat.policy_version)
        if isinstance(outcome, str):
            return answer.model_copy(update={"waiting_for": outcome})
        return answer.model_copy(update={"assignment": outcome})

    def drain(self, key: str) -> None:
        """No new tasks for a worker that asked to leave; it may finish the one that it holds."""
        states.move(self.db.nodes, key, "drain", "it asked to leave", self.db.clock())

    def _now(self, key: str) -> Node:
        """The member, after what time alone changes: a suspension is over, a worker that drains has nothing left to do."""
        node, now_s = self.db.nodes.get(key), self.db.clock()
        if node is None:
            raise PoolError("this key is not registered", 403)
        moved = False
        if node.state == "suspended" and now_s >= node.suspended_until_s:
            moved = states.move(self.db.nodes, key, "time_over", "its suspension is over", now_s)
        elif node.state == "draining" and not self.db.submissions.holds_any(key):
            moved = states.move(self.db.nodes, key, "emptied", node.reason, now_s)
        return (self.db.nodes.get(key) or node) if moved else node

    def _record(self, node: Node, beat: Heartbeat) -> None:
        """Each record is a sync of the disk: a node that beats far too often is recorded less often than it beats."""
        now_s = self.db.clock()
        if self._records.wait_s(node.key, now_s) > 0 and beat.policy_version == node.version:
            return
        self._records.charge(node.key, 1, now_s)
        self.db.nodes.beat(node.key, now_s, beat.policy_version, beat.stats.model_dump_json())

    def _state_for(self, node: Node) -> Literal["running", "finished", "evicted", "left"]:
        """Workers, validators and the learner finish at the last version; roles that serve or evaluate it, after that."""
        role = node.role
        if node.evicted:
            return "evicted"
        if node.state == "left":
            return "left"
        if role in ("worker", "validator", "learner"):
            return "finished" if self.db.policies.newest() == self.config.run.steps else "running"
        return "finished" if self.db.is_finished(self.config.run.steps) else "running"
