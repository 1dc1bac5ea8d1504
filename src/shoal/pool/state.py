"""The pool's state and its transitions, in SQLite: who is a member, what was handed out, what came of it.

    submission:  open -> uploaded -> validating -> accepted | rejected          open -> expired (deadline passed)
    group:       accepted -> in the batch of one step | stale                   (useful groups only)

Invariant: each public method is one transaction, ledger entries included, so kill -9 at any moment leaves a state that is
whole. A step's batch never changes once it is full, so a learner that comes back trains on the same groups.
Called by the coordinator's routes. Time is an argument. Left out: PostgreSQL, trust scores, checking less than everything.
"""

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from shoal.config import Config
from shoal.messages import (
    HARD,
    Assignment,
    Batch,
    BatchGroup,
    Claim,
    ContentOwner,
    Evaluation,
    Heartbeat,
    HeartbeatAnswer,
    InvitePayload,
    NodeStatus,
    Policy,
    Reason,
    Registered,
    Role,
    Stats,
    Status,
    StepReport,
    Verdict,
)
from shoal.pool.ledger import Ledger

SCHEMA = """
CREATE TABLE IF NOT EXISTS nodes (
    key TEXT PRIMARY KEY, name TEXT UNIQUE NOT NULL, role TEXT NOT NULL, url TEXT, invite TEXT UNIQUE NOT NULL,
    seen_s REAL NOT NULL, version INTEGER, stats TEXT NOT NULL DEFAULT '{}', evicted INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS submissions (
    seq INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, worker TEXT NOT NULL, number INTEGER NOT NULL,
    step INTEGER NOT NULL, version INTEGER NOT NULL, digest TEXT NOT NULL, deadline_s REAL NOT NULL,
    state TEXT NOT NULL, hash TEXT, validator TEXT, lease_s REAL, content TEXT, accepted_hash TEXT,
    reason TEXT, verdict TEXT);
CREATE INDEX IF NOT EXISTS submissions_state ON submissions (state, seq);
CREATE INDEX IF NOT EXISTS submissions_content ON submissions (content);
CREATE TABLE IF NOT EXISTS groups (
    seq INTEGER PRIMARY KEY, submission TEXT NOT NULL, grp INTEGER NOT NULL, version INTEGER NOT NULL,
    reward REAL NOT NULL, useful INTEGER NOT NULL, tokens INTEGER NOT NULL, during INTEGER NOT NULL,
    batch INTEGER, stale INTEGER NOT NULL DEFAULT 0, UNIQUE (submission, grp));
CREATE INDEX IF NOT EXISTS groups_batch ON groups (batch, seq);
CREATE TABLE IF NOT EXISTS policies (
    version INTEGER PRIMARY KEY, digest TEXT NOT NULL, size_bytes INTEGER NOT NULL, published_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, metrics TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS evaluations (version INTEGER, final INTEGER, body TEXT NOT NULL, PRIMARY KEY (version, final));
CREATE TABLE IF NOT EXISTS run (started_s REAL NOT NULL);
"""

RECENT_GROUPS = 200  # of which the share of useful ones is estimated
LEAST_USEFUL_SHARE = 0.05  # assumed even where hardly any group is useful, so that queues stay bounded


class PoolError(Exception):
    """A request that the pool's state does not allow; `status` is its HTTP code."""

    def __init__(self, message: str, status: int = 409) -> None:
        super().__init__(message)
        self.status = status


class Pool:
    def __init__(
        self, connection: sqlite3.Connection, ledger: Ledger, config: Config, run: str, clock: Callable[[], float]
    ) -> None:
        connection.row_factory = sqlite3.Row
        connection.executescript(SCHEMA)
        if connection.execute("SELECT 1 FROM run").fetchone() is None:
            connection.execute("INSERT INTO run VALUES (?)", (clock(),))
        self.db = connection
        self.ledger = ledger
        self.config = config
        self.run = run
        self.clock = clock

    # --- members -----------------------------------------------------------------------------------------------------

    def register(self, key: str, invite: InvitePayload, url: str | None) -> Registered:
        """Spend an invite. The same key with the same invite may come again (a restart), with a new address."""
        with self._transaction():
            node = self._one("SELECT * FROM nodes WHERE key = ?", key)
            if node is not None:
                if node["invite"] != invite.nonce:
                    raise PoolError(f"this key is already registered as {node['name']}")
                self.db.execute("UPDATE nodes SET url = ? WHERE key = ?", (url, key))
                return Registered(name=node["name"], role=node["role"])
            if self.clock() > invite.expires_s:
                raise PoolError("the invite has expired; ask for a new one", 403)
            if self._one("SELECT 1 FROM nodes WHERE invite = ? OR name = ?", invite.nonce, invite.name):
                raise PoolError(f"the invite for {invite.name} was used by another key; ask for a new one", 403)
            self.db.execute(
                "INSERT INTO nodes (key, name, role, url, invite, seen_s) VALUES (?, ?, ?, ?, ?, ?)",
                (key, invite.name, invite.role, url, invite.nonce, self.clock()),
            )
            self.ledger.append("registered", {"key": key, "name": invite.name, "role": invite.role})
        return Registered(name=invite.name, role=invite.role)

    def role(self, key: str) -> Role | None:
        """The role of a registered key, None for a stranger."""
        node = self._one("SELECT role FROM nodes WHERE key = ?", key)
        return node["role"] if node else None

    def keys(self) -> dict[Role, list[str]]:
        """Registered keys of every role but workers."""
        found: dict[Role, list[str]] = {}
        for node in self._all("SELECT key, role FROM nodes WHERE role != 'worker' AND NOT evicted ORDER BY rowid"):
            found.setdefault(node["role"], []).append(node["key"])
        return found

    def heartbeat(self, key: str, beat: Heartbeat) -> HeartbeatAnswer:
        """Note that a node lives; hand a worker that wants one its next task."""
        with self._transaction():
            self.db.execute(
                "UPDATE nodes SET seen_s = ?, version = ?, stats = ? WHERE key = ?",
                (self.clock(), beat.policy_version, beat.stats.model_dump_json(), key),
            )
            node = self._one("SELECT * FROM nodes WHERE key = ?", key)
            relays = self._all("SELECT url FROM nodes WHERE role = 'relay' AND url IS NOT NULL AND NOT evicted")
            answer = HeartbeatAnswer(
                state="evicted" if node["evicted"] else self._state_for(node["role"]),
                newest_version=self._newest(),
                relays=[relay["url"] for relay in relays],
            )
            if not beat.wants_task or answer.state != "running" or node["role"] != "worker":
                return answer
            outcome = self._assign(key, beat.policy_version)
        if isinstance(outcome, str):
            return answer.model_copy(update={"waiting_for": outcome})
        return answer.model_copy(update={"assignment": outcome})

    # --- submissions -------------------------------------------------------------------------------------------------

    def _assign(self, worker: str, loaded: int | None) -> Assignment | str:
        """The worker's next task, or what it has to wait for."""
        now_s = self.clock()
        self.db.execute("UPDATE submissions SET state = 'expired' WHERE state = 'open' AND deadline_s < ?", (now_s,))
        step, newest = self._open_step(), self._newest()
        oldest_allowed = step - self.config.coordinator.async_level
        if step >= self.config.run.steps:
            return "the run's last steps to be trained: every batch is full"
        if newest is None or newest < oldest_allowed:
            return f"the learner to publish version {max(oldest_allowed, 0)}"
        if loaded is None or loaded < oldest_allowed:
            return f"this worker to load version {newest}"
        policy = self._one("SELECT * FROM policies WHERE version = ?", loaded)
        if policy is None:
            return f"version {loaded}, which this worker says it has, to be published"
        mine = self._one("SELECT * FROM submissions WHERE worker = ? AND state = 'open'", worker)
        if mine is not None and mine["version"] == loaded:
            return self._assignment(mine)  # it restarted: the same task again, so that restarting chooses nothing
        if mine is not None and loaded < mine["version"]:
            return f"this worker to load version {mine['version']}"  # going back and forth would choose tasks
        if mine is not None:
            self.db.execute("UPDATE submissions SET state = 'expired' WHERE id = ?", (mine["id"],))
        if self._enough_under_way():
            return "the validators and the learner to catch up"
        last = self._one("SELECT max(number) AS number FROM submissions WHERE worker = ?", worker)["number"]
        number = 0 if last is None else last + 1
        self.db.execute(
            "INSERT INTO submissions (id, worker, number, step, version, digest, deadline_s, state)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, 'open')",
            (
                f"{worker[:16]}-{number:06d}",
                worker,
                number,
                step,
                loaded,
                policy["digest"],
                now_s + self.config.coordinator.task_deadline_s,
            ),
        )
        return self._assignment(self._one("SELECT * FROM submissions WHERE seq = last_insert_rowid()"))

    def _enough_under_way(self) -> bool:
        """Whether what is handed out and not yet judged will, at the recent share of useful groups, fill the open batch:
        more would only grow old in the queue. The task of a worker that has gone silent is not counted on."""
        under_way = self._one(
            "SELECT count(*) AS n FROM submissions JOIN nodes ON key = worker"
            " WHERE state IN ('uploaded', 'validating') OR (state = 'open' AND seen_s >= ?)",
            self.clock() - self.config.coordinator.node_timeout_s,
        )
        recent = self._one(
            "SELECT avg(useful) AS share FROM (SELECT useful FROM groups ORDER BY seq DESC LIMIT ?)", RECENT_GROUPS
        )["share"]
        share = max(1.0 if recent is None else recent, LEAST_USEFUL_SHARE)
        expected = self._waiting() + share * under_way["n"] * self.config.workers.groups_per_submission
        return bool(expected >= self.config.coordinator.prompts_per_step)

    def may_upload(self, worker: str, submission: str) -> None:
        """Raise PoolError unless this worker's grant for this submission is still good."""
        row = self._submission(submission)
        if row["worker"] != worker:
            raise PoolError(f"{submission} is another worker's task", 403)
        if row["state"] != "open":
            raise PoolError(f"{submission} is {row['state']}, not open for upload")
        if self.clock() > row["deadline_s"]:
            raise PoolError(f"{submission} came after its deadline; take a new task")
        if row["version"] < (oldest := self._open_step() - self.config.coordinator.async_level):
            raise PoolError(f"{submission} is of version {row['version']}, older than {oldest}; take a new task")

    def uploaded(self, worker: str, submission: str, content_hash: str) -> None:
        with self._transaction():
            self.may_upload(worker, submission)
            self.db.execute(
                "UPDATE submissions SET state = 'uploaded', hash = ? WHERE id = ?", (content_hash, submission)
            )

    def claim(self, validator: str) -> Claim | None:
        """Lease the oldest unchecked submission to a validator; one whose lease ran out is handed out again."""
        with self._transaction():
            row = self._one(
                "SELECT * FROM submissions WHERE state = 'uploaded' OR (state = 'validating' AND"
                " (lease_s < ? OR validator = ?)) ORDER BY seq LIMIT 1",
                self.clock(),
                validator,
            )
            if row is None:
                return None
            lease_s = self.clock() + self.config.coordinator.claim_lease_s
            self.db.execute(
                "UPDATE submissions SET state = 'validating', validator = ?, lease_s = ? WHERE id = ?",
                (validator, lease_s, row["id"]),
            )
        return Claim(assignment=self._assignment(row), worker=row["worker"], lease_s=lease_s)

    def content_owner(self, content: str) -> ContentOwner:
        """Which judged submission first held these rollouts."""
        row = self._one("SELECT id FROM submissions WHERE content = ? ORDER BY seq LIMIT 1", content)
        return ContentOwner(submission=row["id"] if row else None)

    def hashes(self, submission: str) -> tuple[str, str]:
        """Content hashes of the uploaded and of the accepted file, "" where there is none yet."""
        row = self._submission(submission)
        return row["hash"] or "", row["accepted_hash"] or ""

    def accepted_stored(self, validator: str, submission: str, content_hash: str) -> None:
        """A validator has stored the accepted file of a submission it holds the claim on."""
        with self._transaction():
            self._claimed(validator, submission)
            self.db.execute("UPDATE submissions SET accepted_hash = ? WHERE id = ?", (content_hash, submission))

    def judge(self, validator: str, verdict: Verdict) -> None:
        """Accept or reject. A hard rejection slashes the worker and evicts it."""
        with self._transaction():
            if self._one(
                "SELECT 1 FROM submissions WHERE id = ? AND validator = ? AND state IN ('accepted', 'rejected')",
                verdict.submission,
                validator,
            ):
                return  # its answer was lost and it asks again
            row = self._claimed(validator, verdict.submission)
            reason = verdict.reason
            owner = self.content_owner(verdict.content).submission if verdict.content else None
            if reason is None and owner not in (None, row["id"]):
                reason = Reason.REPLAYED  # two validators held copies at the same time
            if reason is None and (row["accepted_hash"] is None or row["accepted_hash"] != verdict.accepted_hash):
                raise PoolError(f"{row['id']}: store the accepted file before accepting it")
            self.db.execute(
                "UPDATE submissions SET state = ?, reason = ?, content = ?, verdict = ? WHERE id = ?",
                (
                    "rejected" if reason else "accepted",
                    reason,
                    verdict.content,
                    verdict.model_dump_json(),
                    row["id"],
                ),
            )
            entry = {"submission": row["id"], "worker": row["worker"], "step": row["step"], "file": row["hash"]}
            if reason is None:
                self._credit(row, verdict)
                tokens = sum(group.tokens for group in verdict.groups)
                self.ledger.append("accepted", entry | {"tokens": tokens, "groups": len(verdict.groups)})
                return
            self.ledger.append("rejected", entry | {"reason": reason.value, "detail": verdict.detail})
            already = self._one("SELECT evicted FROM nodes WHERE key = ?", row["worker"])["evicted"]
            if reason in HARD and not already:
                self.db.execute("UPDATE nodes SET evicted = 1 WHERE key = ?", (row["worker"],))
                self.db.execute(
                    "UPDATE submissions SET state = 'expired' WHERE worker = ? AND state = 'open'", (row["worker"],)
                )
                self.ledger.append("slashed", entry | {"reason": reason.value})

    def _credit(self, row: sqlite3.Row, verdict: Verdict) -> None:
        during = self._open_step()
        for index, group in enumerate(verdict.groups):
            self.db.execute(
                "INSERT INTO groups (submission, grp, version, reward, useful, tokens, during)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (row["id"], index, row["version"], group.reward_mean, group.useful, group.tokens, during),
            )
        self._fill_batches()

    def _fill_batches(self) -> None:
        """Close steps while enough useful groups of allowed age are waiting, oldest first."""
        need = self.config.coordinator.prompts_per_step
        while (step := self._open_step()) < self.config.run.steps:
            self.db.execute(
                "UPDATE groups SET stale = 1 WHERE useful AND batch IS NULL AND version < ?",
                (step - self.config.coordinator.async_level,),
            )
            waiting = self._all(
                "SELECT seq FROM groups WHERE useful AND batch IS NULL AND NOT stale ORDER BY seq LIMIT ?", need
            )
            if len(waiting) < need:
                return
            for group in waiting:
                self.db.execute("UPDATE groups SET batch = ? WHERE seq = ?", (step, group["seq"]))

    # --- learning ----------------------------------------------------------------------------------------------------

    def publish(self, policy: Policy) -> None:
        """Note a published version. The same one again is fine; another digest for it is not."""
        with self._transaction():
            held = self._one("SELECT digest FROM policies WHERE version = ?", policy.version)
            if held is not None:
                if held["digest"] != policy.digest:
                    raise PoolError(f"version {policy.version} was published with another digest")
                return
            self.db.execute(
                "INSERT INTO policies VALUES (?, ?, ?, ?)",
                (policy.version, policy.digest, policy.size_bytes, self.clock()),
            )
            self.ledger.append("policy", {"version": policy.version, "digest": policy.digest})

    def batch(self, step: int) -> Batch:
        """The groups of one step, once it is full."""
        need = self.config.coordinator.prompts_per_step
        if step >= self.config.run.steps:
            return Batch(step=step, ready=False, have=0, need=need, finished=True)
        rows = self._all("SELECT submission, grp FROM groups WHERE batch = ? ORDER BY seq", step)
        if len(rows) < need:
            return Batch(step=step, ready=False, have=self._waiting(), need=need)
        groups = [BatchGroup(submission=row["submission"], group=row["grp"]) for row in rows]
        return Batch(step=step, ready=True, have=need, need=need, groups=groups)

    def trained(self, report: StepReport) -> None:
        """Note one step's metrics, with the rewards of all groups accepted while it was open, useless ones included."""
        judged = self._one(
            "SELECT avg(reward) AS reward, avg(1.0 - useful) AS zero_std FROM groups WHERE during = ?", report.step
        )
        seen = {}
        if judged["reward"] is not None:  # none where leftovers of the step before filled this one at once
            seen = {"reward/mean": judged["reward"], "reward/zero_std_frac": judged["zero_std"]}
        metrics = {"step": float(report.step), "time_s": self.clock()} | report.metrics | seen
        with self._transaction():
            first = self._one("SELECT 1 FROM steps WHERE step = ?", report.step) is None
            self.db.execute("INSERT OR REPLACE INTO steps VALUES (?, ?)", (report.step, json.dumps(metrics)))
            if first:
                self.ledger.append("trained", {"step": report.step, "submissions": sorted(set(report.trained))})

    def evaluated(self, evaluation: Evaluation) -> None:
        with self._transaction():
            self.db.execute(
                "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?)",
                (evaluation.version, evaluation.final, evaluation.model_dump_json()),
            )

    # --- watching ----------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        counts = self._all("SELECT worker, state, count(*) AS n FROM submissions GROUP BY worker, state")
        by = {(row["worker"], row["state"]): row["n"] for row in counts}
        nodes = [
            NodeStatus(
                name=node["name"],
                role=node["role"],
                url=node["url"],
                policy_version=node["version"],
                seen_s=node["seen_s"],
                evicted=bool(node["evicted"]),
                accepted=by.get((node["key"], "accepted"), 0),
                rejected=by.get((node["key"], "rejected"), 0),
                stats=Stats.model_validate_json(node["stats"]),
            )
            for node in self._all("SELECT * FROM nodes ORDER BY role, name")
        ]
        reasons = self._all("SELECT reason, count(*) AS n FROM submissions WHERE reason IS NOT NULL GROUP BY reason")
        evaluations = self._all("SELECT body FROM evaluations ORDER BY version, final")
        totals = self._one("SELECT coalesce(sum(tokens), 0) AS tokens, coalesce(sum(stale), 0) AS stale FROM groups")
        return Status(
            run=self.run,
            state="finished" if self._evaluated_last() else "running",
            step=self._open_step(),
            steps=self.config.run.steps,
            have=self._waiting(),
            need=self.config.coordinator.prompts_per_step,
            newest_version=self._newest(),
            started_s=self._one("SELECT started_s FROM run")["started_s"],
            now_s=self.clock(),
            nodes=nodes,
            metrics=[json.loads(row["metrics"]) for row in self._all("SELECT metrics FROM steps ORDER BY step")],
            evaluations=[Evaluation.model_validate_json(row["body"]) for row in evaluations],
            reject_reasons={row["reason"]: row["n"] for row in reasons},
            slashed=[node.name for node in nodes if node.evicted],
            stale_groups=totals["stale"],
            tokens_generated=totals["tokens"],
        )

    # --- small questions ---------------------------------------------------------------------------------------------

    def _state_for(self, role: str) -> Literal["running", "finished"]:
        """Workers, validators and the learner end with the last version; who serves or evaluates it ends after that."""
        if role in ("worker", "validator", "learner"):
            return "finished" if self._newest() == self.config.run.steps else "running"
        return "finished" if self._evaluated_last() else "running"

    def _evaluated_last(self) -> bool:
        return self._one("SELECT 1 FROM evaluations WHERE final") is not None

    def _open_step(self) -> int:
        """The smallest step that lacks accepted groups."""
        last = self._one("SELECT max(batch) AS step FROM groups")["step"]
        return 0 if last is None else int(last) + 1

    def _waiting(self) -> int:
        return int(self._one("SELECT count(*) AS n FROM groups WHERE useful AND batch IS NULL AND NOT stale")["n"])

    def _newest(self) -> int | None:
        version: int | None = self._one("SELECT max(version) AS version FROM policies")["version"]
        return version

    def _submission(self, submission: str) -> sqlite3.Row:
        row = self._one("SELECT * FROM submissions WHERE id = ?", submission)
        if row is None:
            raise PoolError(f"no submission {submission}", 404)
        return row  # type: ignore[no-any-return]

    def _claimed(self, validator: str, submission: str) -> sqlite3.Row:
        row = self._submission(submission)
        if row["state"] != "validating" or row["validator"] != validator:
            raise PoolError(f"{submission} is {row['state']} and not claimed by this validator")
        return row

    def _assignment(self, row: sqlite3.Row) -> Assignment:
        return Assignment(
            id=row["id"],
            number=row["number"],
            step=row["step"],
            policy_version=row["version"],
            policy_digest=row["digest"],
            groups=self.config.workers.groups_per_submission,
            deadline_s=row["deadline_s"],
            upload_path=f"/v1/submissions/{row['id']}",
            max_bytes=self.config.coordinator.max_submission_bytes,
        )

    def _one(self, sql: str, *arguments: object) -> Any:
        return self.db.execute(sql, arguments).fetchone()

    def _all(self, sql: str, *arguments: object) -> list[sqlite3.Row]:
        return self.db.execute(sql, arguments).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")
