"""Membership: registration with an invite, and heartbeats, by which nodes stay live and workers get tasks.

Heartbeats are written to the table of nodes at once in a small pool, many together in a large one. Each write is a sync of
the disk, and a large pool's heartbeats would be thousands a second. So beyond AT_ONCE_PER_S, with a burst of 10 s, they are
collected and written in one statement every TOGETHER_S. A node that beats far more often than an honest one is recorded
less often than it beats. A beat also says which version the node received, when and how fast: each download is recorded
once, for people to see; nothing is decided by it, and it is not sealed.

Invariants: an invite makes one key a member, once, with one role and one name; an open invite makes every key a worker,
once, that has staked what the run requires, and gets tasks while that is at risk. What is collected of heartbeats is at
most TOGETHER_S older than the newest one of the pool; to lose it costs nothing, as the next one follows. Nothing else of a
heartbeat waits: tasks, fingerprints and announced files have their own tables.
"""

import logging
from collections.abc import Sequence
from typing import Literal
from urllib.parse import urlsplit

from shoal.config import Config
from shoal.config.sections import RequirementsSection
from shoal.coordinator.assignment import Assignments
from shoal.coordinator.checkers import Checkers
from shoal.coordinator.credit import StakeView
from shoal.coordinator.database import Database, PoolError
from shoal.coordinator.nodes import Member
from shoal.ledger.connection import SERIAL
from shoal.protocol.invite import AddressError, server_url
from shoal.protocol.messages import Capability, Heartbeat, HeartbeatAnswer, Intake, InvitePayload, Registered, Role
from shoal.protocol.pace import Rates
from shoal.shardcast.fetch.reach import OutOfReach, check_host

DOWNLOADS = [
    f"""CREATE TABLE IF NOT EXISTS transfers (
    seq {SERIAL}, node TEXT NOT NULL, version BIGINT NOT NULL, from_s DOUBLE PRECISION NOT NULL,
    to_s DOUBLE PRECISION NOT NULL, size_bytes BIGINT NOT NULL, UNIQUE (node, version))""",
    "CREATE INDEX IF NOT EXISTS transfers_to ON transfers (to_s)",
]
KEPT = 100_000
Download = tuple[str, int, float, float, int]  # key, version, from when to when by the coordinator's clock, bytes
RECORDS_PER_S = 4.0  # of one node's heartbeats, with a burst of 10 s; an honest node beats once a second
AT_ONCE_PER_S = 50.0  # of all nodes
TOGETHER_S = 0.25
LONGEST_S = 86_400.0  # of a download, or since it

log = logging.getLogger(__name__)


class Members:
    def __init__(
        self, db: Database, config: Config, assignments: Assignments, checkers: Checkers, stakes: StakeView
    ) -> None:
        self.db = db
        self.config = config
        self.assignments = assignments
        self.checkers = checkers
        self.stakes = stakes
        self._least_stake = max(1, config.requirements.stake)
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

    def _check_place(self, role: Role) -> None:
        places = self.config.requirements.places
        if role == "worker" and places and self.db.nodes.count_workers(self.db.clock()) >= places:
            raise PoolError(f"this run is full: it has places for {places} workers; try again when one has left", 403)

    def _check_stake(self, key: str) -> None:
        staked, least = self.stakes.offered(key), self._least_stake
        if staked < least:
            raise PoolError(
                f"this key has staked {staked}, an open invite needs {least}: stake more and join again", 403
            )

    def _why_no_stake(self, node: Member) -> str:
        """What a worker that joined by stake has to wait for before it gets a task; "" if nothing."""
        if not node.joined_by_stake or (staked := self.stakes.at_risk(node.key)) >= self._least_stake:
            return ""
        return f"stake: {staked} is at risk on this key, and this run requires {self._least_stake}"

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
                self.db.nodes.set(key, url=url)
                self._report(key, capability)
                self.db.nodes.move(key, "return", "it came back", self.db.clock())
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
            self.db.nodes.set(key, capability=capability.model_dump_json())

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
            self.checkers.report(key, beat)
            if beat.finished is not None and node.role == "worker":
                self.assignments.finished(key, beat.finished)
            answer = HeartbeatAnswer(
                state=self._state_for(node),
                newest_version=self.db.policies.newest(),
                relays=self.db.nodes.relay_urls(),
                banned=self.db.nodes.evicted_keys() if node.role in ("origin", "relay") else [],
                renewals=self.checkers.renewals(key),
            )
            if not beat.wants_task or answer.state != "running" or node.role != "worker":
                return answer
            if why := self._why_no_stake(node) or self.checkers.why_no_task(key):
                return answer.model_copy(update={"waiting_for": why})
            outcome = self.assignments.assign(
                key, beat.policy_version, beat.finished.submission if beat.finished else "", beat.working_on
            )
        if isinstance(outcome, str):
            return answer.model_copy(update={"waiting_for": outcome})
        return answer.model_copy(update={"assignment": outcome})

    def drain(self, key: str) -> None:
        """No new tasks for a worker that asked to leave; it may finish the one that it holds."""
        self.db.nodes.move(key, "drain", "it asked to leave", self.db.clock())

    def _now(self, key: str) -> Member:
        """The member, after what time alone changes: a suspension is over, a worker that drains has nothing left to do."""
        node, now_s = self.db.nodes.get(key), self.db.clock()
        if node is None:
            raise PoolError("this key is not registered", 403)
        moved = False
        if node.state == "suspended" and now_s >= node.suspended_until_s:
            moved = self.db.nodes.move(key, "time_over", "its suspension is over", now_s)
        elif node.state == "draining" and not self.db.submissions.held_by(key):
            moved = self.db.nodes.move(key, "emptied", node.reason, now_s)
        return (self.db.nodes.get(key) or node) if moved else node

    def _state_for(self, node: Member) -> Literal["running", "finished", "evicted", "left"]:
        """Workers, validators and the learner finish at the last version; roles that serve or evaluate it, after that."""
        role = node.role
        if node.evicted:
            return "evicted"
        if node.state == "left":
            return "left"
        if role in ("worker", "validator", "learner"):
            return "finished" if self.db.policies.newest() == self.config.run.steps else "running"
        return "finished" if self.db.is_finished(self.config.run.steps) else "running"


class Beats:
    """What of heartbeats is not written yet."""

    def __init__(self, db: Database, *, at_once_per_s: float = AT_ONCE_PER_S) -> None:
        self.db = db
        self._of_node, self._at_once = Rates(RECORDS_PER_S), Rates(at_once_per_s)
        self._collected: dict[str, tuple[str, float, int | None, str]] = {}
        self._came: dict[str, int] = {}  # by key: the version whose download was recorded last
        self._downloads: list[Download] = []
        self._written_s = 0.0

    def take(self, node: Member, beat: Heartbeat) -> None:
        now_s = self.db.clock()
        if self._of_node.wait_s(node.key, now_s) > 0 and beat.policy_version == node.version:
            return
        self._of_node.charge(node.key, 1, now_s)
        self._collected[node.key] = (node.key, now_s, beat.policy_version, beat.stats.model_dump_json())
        self._note_download(node.key, beat.stats.intake, now_s)
        if self._at_once.wait_s("", now_s) > 0 and 0 <= now_s - self._written_s < TOGETHER_S:
            return
        self._at_once.charge("", len(self._collected), now_s)
        self.db.nodes.beat_all(list(self._collected.values()))
        self.record_downloads(self._downloads)
        self._collected.clear()
        self._downloads.clear()
        self._written_s = now_s

    def _note_download(self, key: str, intake: Intake, now_s: float) -> None:
        """What a node says of its newest download, if it is of a version that exists and another one than the last time."""
        version = intake.version
        if version is None or version == self._came.get(key) or version > (self.db.policies.newest() or 0) + 1:
            return
        self._came[key] = version
        to_s = now_s - min(intake.ago_s, LONGEST_S)
        self._downloads.append((key, version, to_s - min(intake.took_s, LONGEST_S), to_s, intake.size_bytes))

    def record_downloads(self, rows: Sequence[Download]) -> None:
        """One that is known already changes nothing; the newest KEPT are kept."""
        for row in rows:
            self.db.connection.change(
                "INSERT INTO transfers (node, version, from_s, to_s, size_bytes) VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT (node, version) DO NOTHING",
                *row,
            )
        if rows:
            self.db.connection.change("DELETE FROM transfers WHERE seq <= (SELECT max(seq) FROM transfers) - ?", KEPT)


def lacks(reported: Capability | None, wants: RequirementsSection) -> str:
    """What the run requires and a machine does not report; "" if it reports all of it.

    A report can only shut its sender out: no task, size or pay follows from it.
    """
    engine = reported.engine if reported else ""
    if not wants.engines or engine in wants.engines:
        return ""
    return f"an engine of {', '.join(wants.engines)} (it has {engine or 'not said which'})"


def _entry(key: str, invite: InvitePayload) -> tuple[str, str]:
    """Name and entry in the list of spent invites. An open invite is spent once by each key.

    Nobody finds another key with the same 64 bits, and so takes the name of a stranger before it joins.
    """
    return (f"{invite.name[:23]}-{key[:16]}", f"{invite.nonce} {key}") if invite.open else (invite.name, invite.nonce)
