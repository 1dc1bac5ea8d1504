"""Membership: registration with an invite, and heartbeats, which keep nodes live and give workers tasks.

A small pool writes each heartbeat at once. Each write syncs the disk, so above IMMEDIATE_PER_S (with a burst of 10 s)
heartbeats are buffered and written in one statement every FLUSH_S. If a node sends more than RECORDS_PER_S heartbeats,
only some of them are recorded: the others change nothing, except that a worker may get a task. A heartbeat also reports
the node's newest download. Each download is recorded once, for display only. The seal does not cover downloads.

Invariants: an invite admits one key, with one role and one name. An open invite admits any key as a worker if it has
staked the required amount. The key gets tasks, and holds a place, only while that stake is at risk. Buffered heartbeats
are at most FLUSH_S old. Losing some costs nothing, because each node soon sends another. Only liveness is buffered:
tasks, and the fingerprints and announced files of recorded heartbeats, are written at once.
"""

import logging
from collections.abc import Sequence
from typing import Literal

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
from shoal.shardcast.fetch import FetchError
from shoal.shardcast.fetch.reach import OutOfReach, address_of, check_host, split_server

DOWNLOADS = [
    f"""CREATE TABLE IF NOT EXISTS transfers (
    seq {SERIAL}, node TEXT NOT NULL, version BIGINT NOT NULL, from_s DOUBLE PRECISION NOT NULL,
    to_s DOUBLE PRECISION NOT NULL, size_bytes BIGINT NOT NULL, UNIQUE (node, version))""",
    "CREATE INDEX IF NOT EXISTS transfers_to ON transfers (to_s)",
]
MAX_DOWNLOADS = 100_000
Download = tuple[str, int, float, float, int]  # key, version, start and end by the coordinator's clock, bytes
RECORDS_PER_S = 4.0  # recorded heartbeats per node, with a burst of 10 s; a busy node sends one a second
IMMEDIATE_PER_S = 50.0  # heartbeats of all nodes together that are written at once
FLUSH_S = 0.25
ONE_VALIDATOR = (
    "one validator: it alone decides what is accepted, and nobody is slashed, dismissed or suspended for a false file;"
    " with two or more (validator.count), they check each other"
)
MAX_REFUSED = 8  # refused versions that the coordinator reports to the learner
MAX_DOWNLOAD_S = 86_400.0  # limit on a download's duration, and on the time since its end

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
        self.coordinator_url = ""  # set when the coordinator listens
        self._min_stake = max(1, config.requirements.stake)
        self._beats = HeartbeatBuffer(db)
        self._refused: dict[str, str] = {}  # by key: the version that a node refuses to load, and why

    def may_register(self, key: str, invite: InvitePayload, capability: Capability | None = None) -> None:
        """Raise PoolError unless this invite admits this key on a machine with this capability. Change nothing."""
        if self.check_invite(key, invite, capability):
            self._check_stake(key)

    def check_invite(self, key: str, invite: InvitePayload, capability: Capability | None = None) -> bool:
        """Check all but the stake. Return whether the key needs one. Raise PoolError; change nothing."""
        if invite.role == "worker" and (missing := missing_requirement(capability, self.config.requirements)):
            raise PoolError(f"this run requires {missing}", 403)
        node, (name, entry) = self.db.nodes.get(key), _entry(key, invite)
        if node is not None:
            if node.invite != entry:
                raise PoolError(f"this key is already registered as {node.name}")
            if node.state == "left":
                self._check_capacity(invite.role)
            return False
        if self.db.clock() > invite.expires_s:
            raise PoolError("the invite has expired; ask for a new one", 403)
        if self.db.nodes.is_used(entry):
            raise PoolError(f"the invite for {name} was used by another key; ask for a new one", 403)
        if self.db.nodes.is_taken(name):
            raise PoolError(f"the name {name} is taken; ask for an invite with another name", 403)
        self._check_capacity(invite.role)
        return invite.open

    def _check_capacity(self, role: Role) -> None:
        places = self.config.requirements.places
        if role == "worker" and places and self.count_workers() >= places:
            raise PoolError(f"this run is full: it has places for {places} workers; try again when one has left", 403)

    def count_workers(self) -> int:
        """Count the live workers that may get tasks. Those with too little stake at risk hold no place."""
        return sum(not self._why_no_stake(node) for node in self.db.nodes.live_workers(self.db.clock()))

    def _check_stake(self, key: str) -> None:
        staked, required = self.stakes.offered(key), self._min_stake
        if staked < required:
            raise PoolError(
                f"this key has staked {staked}, but an open invite needs {required}: stake more and join again", 403
            )

    def _why_no_stake(self, node: Member) -> str:
        """Return why a worker that joined by stake gets no task yet; "" if it may have one."""
        if not node.joined_by_stake or (staked := self.stakes.at_risk(node.key)) >= self._min_stake:
            return ""
        return f"more stake: this key has {staked} at risk, and this run requires {self._min_stake}"

    def register(
        self,
        key: str,
        invite: InvitePayload,
        url: str | None,
        capability: Capability | None = None,
        payer: str = "",
    ) -> Registered:
        """Register a key with an invite. After a restart, the same key and invite may register again at a new address.

        `payer`: the on-chain account that stakes on this key; only the one in the first registration counts.
        """
        if url is not None:
            if invite.role not in ("origin", "relay"):
                raise PoolError(f"a {invite.role} opens no port, so it has no URL to announce: leave it out", 400)
            self._check_url(url)
        if url is not None and invite.role == "relay":  # but no relay may keep the origin out
            self._check_taken(key, url)
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
            if invite.role == "validator" and len(self.checkers.live_validators()) == 1:
                self.checkers.notify(ONE_VALIDATOR)
            paid_by = {"payer": payer} if payer else {}
            self.db.ledger.append("registered", {"key": key, "name": name, "role": invite.role} | paid_by)
        log.info("%s joined as %s, key %s", name, invite.role, key[:16])
        return Registered(name=name, role=invite.role)

    def _report(self, key: str, capability: Capability | None) -> None:
        if capability is not None:
            self.db.nodes.set(key, capability=capability.model_dump_json())

    def _check_url(self, url: str) -> None:
        """Raise PoolError for a URL outside `relays.reach`, or one that a client cannot use.

        Every node connects to this URL, so it must not lead into a node's private network.
        """
        try:
            check_host(split_server(server_url(url)).hostname or "", self.config.reach)
        except (AddressError, FetchError) as error:
            raise PoolError(f"cannot announce {url[:80]!r}: a server's URL is http://HOST:PORT", 400) from error
        except OutOfReach as error:
            raise PoolError(f"cannot announce {url[:80]!r}: {error}", 400) from error

    def _check_taken(self, key: str, url: str) -> None:
        """Raise PoolError for another server's URL: that server would get the requests that are meant for this relay.

        Names are not resolved, so another name of that server is not recognised.
        """
        servers = [node for node in self.db.nodes.servers(self.db.clock()) if node.key != key]
        taken = [("the coordinator", self.coordinator_url), *((node.name, node.url) for node in servers)]
        for name, other in taken:
            if other and _host_port(other) == _host_port(url):
                raise PoolError(
                    f"cannot announce {url[:80]!r}: it is the address of {name}; announce this server's own (--url), or "
                    f"stop {name} and try again {self.db.nodes.timeout_s:g} s later"
                )

    def role(self, key: str) -> Role | Literal["evicted"] | None:
        """Return the role of a registered key, "evicted" for a banned one, None for an unknown one."""
        node = self.db.nodes.get(key)
        return None if node is None else "evicted" if node.evicted else node.role

    def keys(self) -> dict[Role, list[str]]:
        """Return the registered keys of every role except workers."""
        keys: dict[Role, list[str]] = {}
        for role, key in self.db.nodes.trusted_keys():
            keys.setdefault(role, []).append(key)
        return keys

    def heartbeat(self, key: str, beat: Heartbeat) -> HeartbeatAnswer:
        """Record a node's heartbeat; assign a task to a worker that requests one. A banned key is only told so."""
        with self.db.transaction():
            node = self._refresh(key)
            if node.evicted:
                return HeartbeatAnswer(state="evicted", newest_version=None, relays=[])
            if recorded := self._beats.record(node, beat):
                self.checkers.report(key, beat)
                if beat.finished is not None and node.role == "worker":
                    self.assignments.finished(key, beat.finished)
            answer = HeartbeatAnswer(
                state=self._state_for(node),
                newest_version=self.db.policies.newest(),
                relays=self.db.nodes.relay_urls(),
                banned=self.db.nodes.evicted_keys() if node.role in ("origin", "relay") else [],
                keep=self.db.kept_versions() if node.role in ("origin", "relay") else [],
                renewals=self.checkers.renewals(key),
                refused=self._refusals(node, beat),
            )
            if not beat.wants_task or answer.state != "running" or node.role != "worker":
                return answer
            if beat.finished is not None and not recorded:  # else the worker would get the finished task again
                return answer.model_copy(update={"waiting_for": "its next recorded heartbeat: it sends too many"})
            if why := self._why_no_stake(node) or self.checkers.why_no_task(key):
                return answer.model_copy(update={"waiting_for": why})
            outcome = self.assignments.assign(
                key, beat.policy_version, beat.finished.submission if beat.finished else "", beat.working_on
            )
        if isinstance(outcome, str):
            return answer.model_copy(update={"waiting_for": outcome})
        return answer.model_copy(update={"assignment": outcome})

    def _refusals(self, node: Member, beat: Heartbeat) -> list[str]:
        """Note which version a node refuses to load. Return for the learner what the nodes say, newest last."""
        self._refused.pop(node.key, None)
        if beat.refused:
            self._refused[node.key] = beat.refused
        newest = list(self._refused.items())[-MAX_REFUSED:] if node.role == "learner" else []
        return [f"{self.db.nodes.name(key)} refuses {why}" for key, why in newest]

    def drain(self, key: str) -> None:
        """Give no new tasks to a worker that asked to leave. It may finish the tasks that it has."""
        self.db.nodes.move(key, "drain", "it asked to leave", self.db.clock())

    def _refresh(self, key: str) -> Member:
        """Make the transitions that are due: an elapsed suspension ends, a drained worker leaves. Return the member."""
        node, now_s = self.db.nodes.get(key), self.db.clock()
        if node is None:
            raise PoolError("this key is not registered", 403)
        moved = False
        if node.state == "suspended" and now_s >= node.suspended_until_s:
            moved = self.db.nodes.move(key, "time_over", "its suspension is over", now_s)
        elif node.state == "draining" and not self.db.submissions.held_by(key):
            moved = self.db.nodes.move(key, "emptied", node.reason, now_s)
        return (self.db.nodes.get(key) or node) if moved else node

    def _state_for(self, node: Member) -> Literal["running", "finished", "left"]:
        """Return the state to report to a node.

        Workers, validators and the learner finish when the last version is published, but validators not while work is
        in doubt. Other roles finish when that version is evaluated, too.
        """
        role, steps = node.role, self.config.run.steps
        if node.state == "left":
            return "left"
        ended = self.db.policies.newest() == steps
        if role == "validator":
            ended = ended and not self.db.submissions.doubted_workers()
        elif role not in ("worker", "learner"):
            ended = self.db.is_finished(steps)
        return "finished" if ended else "running"


class HeartbeatBuffer:
    """Heartbeats that wait to be written."""

    def __init__(self, db: Database, *, immediate_per_s: float = IMMEDIATE_PER_S) -> None:
        self.db = db
        self._node_rates, self._immediate = Rates(RECORDS_PER_S), Rates(immediate_per_s)
        self._buffer: dict[str, tuple[str, float, int | None, str]] = {}
        self._downloaded: dict[str, int] = {}  # by key: the version of the newest recorded download
        self._downloads: list[Download] = []
        self._written_s = 0.0

    def record(self, node: Member, beat: Heartbeat) -> bool:
        """Buffer a heartbeat, and write the buffer when it is due. Return False if the node exceeds RECORDS_PER_S."""
        now_s = self.db.clock()
        if self._node_rates.wait_s(node.key, now_s) > 0:
            return False
        self._node_rates.charge(node.key, 1, now_s)
        self._buffer[node.key] = (node.key, now_s, beat.policy_version, beat.stats.model_dump_json())
        self._note_download(node.key, beat.stats.intake, now_s)
        if self._immediate.wait_s("", now_s) > 0 and 0 <= now_s - self._written_s < FLUSH_S:
            return True
        self._immediate.charge("", len(self._buffer), now_s)
        self.db.nodes.beat_all(list(self._buffer.values()))
        self.record_downloads(self._downloads)
        self._buffer.clear()
        self._downloads.clear()
        self._written_s = now_s
        return True

    def _note_download(self, key: str, intake: Intake, now_s: float) -> None:
        """Queue a node's reported download if its version exists and was not recorded before."""
        version = intake.version
        if version is None or version == self._downloaded.get(key) or version > (self.db.policies.newest() or 0) + 1:
            return
        self._downloaded[key] = version
        to_s = now_s - min(intake.ago_s, MAX_DOWNLOAD_S)
        self._downloads.append((key, version, to_s - min(intake.took_s, MAX_DOWNLOAD_S), to_s, intake.size_bytes))

    def record_downloads(self, rows: Sequence[Download]) -> None:
        """Write the downloads that are not in the table yet. Keep the newest MAX_DOWNLOADS."""
        for row in rows:
            self.db.connection.change(
                "INSERT INTO transfers (node, version, from_s, to_s, size_bytes) VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT (node, version) DO NOTHING",
                *row,
            )
        if rows:
            self.db.connection.change(
                "DELETE FROM transfers WHERE seq <= (SELECT max(seq) FROM transfers) - ?", MAX_DOWNLOADS
            )


def _host_port(url: str) -> tuple[str, int]:
    """Return where a server's URL leads: the same for all spellings of one address or name. Raise FetchError."""
    parts = split_server(url)
    host = (parts.hostname or "").removesuffix(".")
    if (address := address_of(host)) is not None:
        host = str(getattr(address, "ipv4_mapped", None) or address)
    return host, parts.port or (443 if parts.scheme == "https" else 80)


def missing_requirement(reported: Capability | None, required: RequirementsSection) -> str:
    """Return the requirement that the machine's report does not meet; "" if it meets all.

    A false report can only exclude its sender: tasks, their size and credit do not depend on it.
    """
    engine = reported.engine if reported else ""
    if not required.engines or engine in required.engines:
        return ""
    return f"one of these engines: {', '.join(required.engines)} (this machine has {engine or 'none'})"


def _entry(key: str, invite: InvitePayload) -> tuple[str, str]:
    """Return the node's name and its entry in the list of used invites. Each key may use an open invite once.

    The name includes 64 bits of the key, so nobody can make a key that takes the name of a stranger that has not
    joined yet.
    """
    return (f"{invite.name[:23]}-{key[:16]}", f"{invite.nonce} {key}") if invite.open else (invite.name, invite.nonce)
