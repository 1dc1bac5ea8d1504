"""Membership: registration with an invite, and heartbeats, by which nodes stay live and workers get tasks.

Invariant: an invite makes one key a member, once, with one role and one name; an open invite makes every key a worker, once,
that has staked what the run requires, and gets tasks while that is at risk.
Called by the coordinator's routes. What a member may do is in `states`.
"""

import logging
from typing import Literal
from urllib.parse import urlsplit

from shoal.config import Config
from shoal.coordinator.credit.stakes import StakeView
from shoal.coordinator.jobs.assignments import Assignments
from shoal.coordinator.jobs.fitness import RETRY_S, lacks
from shoal.coordinator.membership.beats import Beats
from shoal.coordinator.standing import states
from shoal.coordinator.state.database import Database, PoolError
from shoal.coordinator.tables.nodes import Node
from shoal.coordinator.trust.classes import Classes
from shoal.protocol.address import AddressError, server_url
from shoal.protocol.messages import Capability, Heartbeat, HeartbeatAnswer, InvitePayload, Registered, Role
from shoal.shardcast.fetch.reach import OutOfReach, check_host

log = logging.getLogger(__name__)


class Members:
    def __init__(
        self,
        db: Database,
        config: Config,
        assignments: Assignments,
        classes: Classes,
        stakes: StakeView,
    ) -> None:
        self.db = db
        self.config = config
        self.assignments = assignments
        self.classes = classes
        self.stakes = stakes
        self._beats = Beats(db)

    def may_register(self, key: str, invite: InvitePayload, capability: Capability | None = None) -> None:
        """Raise PoolError unless this invite lets this key, on such a machine, in. Changes nothing."""
        if invite.role == "worker" and (missing := lacks(capability, self.config.requirements)):
            raise PoolError(f"this run requires {missing}", 403)
        node, (name, entry) = self.db.nodes.get(key), _entry(key, invite)
        if node is not None:
            if node.invite != entry:
                raise PoolError(f"this key is already registered as {node.name}")
            if node.state == "left":
                self._check_place(invite.role)
            return
        if self.db.clock() > invite.expires_s:
            raise PoolError("the invite has expired; ask for a new one", 403)
        if self.db.nodes.is_taken(entry, name):
            raise PoolError(f"the invite for {name} was used by another key; ask for a new one", 403)
        self._check_place(invite.role)
        if invite.open:
            self._check_stake(key)

    def count_workers(self) -> int:
        """Workers that live and may work: each has one of the run's places."""
        return self.db.nodes.count_workers(self.db.clock() - self.config.coordinator.node_timeout_s)

    def _check_place(self, role: Role) -> None:
        places = self.config.requirements.places
        if role == "worker" and places and self.count_workers() >= places:
            raise PoolError(f"this run is full: it has places for {places} workers; try again when one has left", 403)

    def _check_stake(self, key: str) -> None:
        staked, least = self.stakes.offered(key), self._least_stake()
        if staked < least:
            raise PoolError(
                f"this key has staked {staked}, an open invite needs {least}: stake more and join again", 403
            )

    def _least_stake(self) -> int:
        return max(1, self.config.requirements.stake)

    def _why_no_stake(self, node: Node) -> str:
        """What a worker that joined by stake has to wait for before it gets a task; "" if nothing."""
        if not node.joined_by_stake or (staked := self.stakes.at_risk(node.key)) >= self._least_stake():
            return ""
        return f"stake: {staked} is at risk on this key, and this run requires {self._least_stake()}"

    def register(
        self,
        key: str,
        invite: InvitePayload,
        url: str | None,
        capability: Capability | None = None,
        payer: str = "",
    ) -> Registered:
        """Spend an invite. The same key may repeat the same invite (a restart), with a new address.

        `payer`: the account on a chain that stakes on this key; the first one that it names stays.
        """
        if url is not None:
            self._check_url(url)
        with self.db.transaction():
            self.may_register(key, invite, capability)
            node = self.db.nodes.get(key)
            if node is not None:
                self.db.nodes.set_url(key, url)
                self._report(key, capability)
                states.move(self.db.nodes, key, "return", "it came back", self.db.clock())
                return Registered(name=node.name, role=node.role)
            name, entry = _entry(key, invite)
            self.db.nodes.add(key, name, invite.role, url, entry, self.db.clock())
            self._report(key, capability)
            paid_by = {"payer": payer} if payer else {}
            self.db.ledger.append("registered", {"key": key, "name": name, "role": invite.role} | paid_by)
        log.info("%s joined as %s, key %s", name, invite.role, key[:16])
        return Registered(name=name, role=invite.role)

    def _report(self, key: str, capability: Capability | None) -> None:
        if capability is not None:
            self.db.nodes.set_capability(key, capability.model_dump_json())

    def _check_url(self, url: str) -> None:
        """Every node of the run connects to what relays announce, so nobody may send them into their own networks."""
        try:
            check_host(urlsplit(server_url(url)).hostname or "", self.config.reach)
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
            self._beats.take(node, beat)
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
            if why := self._why_no_stake(node) or self.classes.why_no_task(key):
                return answer.model_copy(update={"waiting_for": why})
            outcome = self.assignments.assign(
                key, beat.policy_version, beat.finished.submission if beat.finished else "", beat.working_on
            )
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
        elif node.state == "unfit" and now_s >= node.state_s + RETRY_S:
            moved = states.move(self.db.nodes, key, "time_over", "it is measured again", now_s)
        elif node.state == "draining" and not self.db.submissions.held_by(key):
            moved = states.move(self.db.nodes, key, "emptied", node.reason, now_s)
        return (self.db.nodes.get(key) or node) if moved else node

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


def _entry(key: str, invite: InvitePayload) -> tuple[str, str]:
    """Name and entry in the list of spent invites. An open invite is spent once by each key.

    Nobody finds another key with the same 64 bits, and so takes the name of a stranger before it joins.
    """
    return (f"{invite.name[:23]}-{key[:16]}", f"{invite.nonce} {key}") if invite.open else (invite.name, invite.nonce)
