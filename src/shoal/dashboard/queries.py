"""Every SQL statement of the dashboard, over the coordinator's tables.

Invariant: it reads only. What grows with the run is grouped or limited in SQL, so an answer's size is bounded. A submission
is named by its sequence number: its id holds a part of a worker's key. Called by the rest of this room, in one thread.
"""

from dataclasses import dataclass
from typing import Any

from shoal.ledger.connection import Connection

# How long ago a claim was made is not stored: a lease ends `claim_lease_s` after it.
LAST = 1 << 62  # beyond every number of an entry
JUDGED = "state IN ('accepted', 'rejected')"


@dataclass(frozen=True)
class Wanted:
    """Which rows of the rollout browser. None and "": any."""

    verdict: str = ""  # accepted | rejected | filtered | stale
    worker: str = ""
    source: str = ""
    task: int | None = None
    reason: str = ""
    reward_min: float | None = None
    reward_max: float | None = None
    version: int | None = None
    before: tuple[int, int] | None = None  # (submission, group): only older rows


class Queries:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def newest_s(self) -> float:
        """When anything last happened."""
        found = self.connection.row(
            "SELECT (SELECT max(seen_s) FROM nodes), (SELECT max(published_s) FROM policies), (SELECT started_s FROM run)"
        )
        return max(float(value) for value in found if value is not None)

    # --- per step ----------------------------------------------------------------------------------------------------

    def groups_by_step(self) -> list[tuple[Any, ...]]:
        """Step, groups accepted while it was open, of these: useful, without a signal, too old; and their tokens."""
        return self.connection.rows(
            "SELECT accepted_during, count(*), sum(CASE WHEN useful AND NOT stale THEN 1 ELSE 0 END),"
            " sum(CASE WHEN NOT useful THEN 1 ELSE 0 END), sum(CASE WHEN stale THEN 1 ELSE 0 END), sum(tokens)"
            " FROM groups GROUP BY accepted_during ORDER BY accepted_during"
        )

    def verdicts_by_step(self) -> list[tuple[int, str, int, int]]:
        """Step, reason ("" for accepted), submissions, groups."""
        return self.connection.rows(
            f"SELECT step, coalesce(reason, ''), count(*), sum(groups) FROM submissions WHERE {JUDGED}"
            " GROUP BY step, coalesce(reason, '') ORDER BY step"
        )

    def lost_by_step(self) -> list[tuple[int, int]]:
        """Step, and groups that came too late to be judged."""
        return self.connection.rows(
            "SELECT step, sum(groups) FROM submissions WHERE state = 'stale' GROUP BY step ORDER BY step"
        )

    # --- validation --------------------------------------------------------------------------------------------------

    def queue(self, limit: int) -> list[tuple[Any, ...]]:
        """Submission, worker, groups, version, state, upload and validator of what waits for a verdict, oldest first."""
        return self.connection.rows(
            "SELECT s.seq, w.name, s.groups, s.version, s.state, s.uploaded_s, v.name FROM submissions s"
            " LEFT JOIN nodes w ON w.key = s.worker LEFT JOIN nodes v ON v.key = s.validator"
            " WHERE s.state IN ('uploaded', 'validating') ORDER BY s.seq LIMIT ?",
            limit,
        )

    def states(self) -> dict[str, int]:
        return dict(self.connection.rows("SELECT state, count(*) FROM submissions GROUP BY state"))

    def waits_s(self, newest: int) -> list[tuple[float, float]]:
        """Seconds from upload to verdict of the newest judged submissions, and their tokens."""
        return self.connection.rows(
            f"SELECT judged_s - uploaded_s, tokens FROM submissions WHERE {JUDGED} AND uploaded_s IS NOT NULL"
            " AND judged_s IS NOT NULL ORDER BY seq DESC LIMIT ?",
            newest,
        )

    def rejected(self, limit: int) -> list[tuple[Any, ...]]:
        """Submission, worker, reason, verdict's JSON, judged_s, step, version, groups; newest first."""
        return self.connection.rows(
            "SELECT s.seq, n.name, s.reason, s.verdict, s.judged_s, s.step, s.version, s.groups FROM submissions s"
            " LEFT JOIN nodes n ON n.key = s.worker WHERE s.state = 'rejected' ORDER BY s.seq DESC LIMIT ?",
            limit,
        )

    def trust(self) -> dict[str, tuple[int, int]]:
        """By worker's name: submissions accepted after a full check since its last rejection, and all full checks."""
        rows = self.connection.rows(
            "SELECT n.name, sum(CASE WHEN s.state = 'accepted' AND s.seq > coalesce(r.last, 0) THEN 1 ELSE 0 END), count(*)"
            " FROM submissions s JOIN nodes n ON n.key = s.worker LEFT JOIN (SELECT worker, max(seq) AS last FROM"
            " submissions WHERE state = 'rejected' GROUP BY worker) r ON r.worker = s.worker"
            f" WHERE s.full_check AND s.{JUDGED} GROUP BY n.name"
        )
        return {name: (int(streak), int(checks)) for name, streak, checks in rows}

    # --- timeline ----------------------------------------------------------------------------------------------------

    def work(self, from_s: float, to_s: float, limit: int) -> list[tuple[Any, ...]]:
        """Submissions that anybody worked on in this time, newest first."""
        return self.connection.rows(
            "SELECT s.seq, w.name, v.name, s.step, s.version, s.groups, s.state, coalesce(s.reason, ''), s.assigned_s,"
            " s.uploaded_s, s.lease_s, s.judged_s FROM submissions s JOIN nodes w ON w.key = s.worker"
            " LEFT JOIN nodes v ON v.key = s.validator"
            " WHERE s.assigned_s <= ? AND coalesce(s.judged_s, s.uploaded_s, ?) >= ? ORDER BY s.seq DESC LIMIT ?",
            to_s,
            to_s,
            from_s,
            limit,
        )

    def published(self, from_s: float, to_s: float, limit: int) -> list[tuple[int, float, int]]:
        """Version, time and size of what was published in this time, newest first."""
        return self.connection.rows(
            "SELECT version, published_s, size_bytes FROM policies WHERE published_s BETWEEN ? AND ?"
            " ORDER BY version DESC LIMIT ?",
            from_s,
            to_s,
            limit,
        )

    def transfers(self, from_s: float, to_s: float, limit: int) -> list[tuple[str, str, int, float, float, int]]:
        """Node, role, version, from when to when and bytes of downloads in this time, newest first."""
        if not self.connection.has_table("transfers"):  # a run of an older Shoal
            return []
        return self.connection.rows(
            "SELECT n.name, n.role, t.version, t.from_s, t.to_s, t.size_bytes FROM transfers t"
            " JOIN nodes n ON n.key = t.node WHERE t.to_s >= ? AND t.from_s <= ? ORDER BY t.to_s DESC LIMIT ?",
            from_s,
            to_s,
            limit,
        )

    # --- rollouts ----------------------------------------------------------------------------------------------------

    def groups(self, wanted: Wanted, limit: int) -> list[tuple[Any, ...]]:
        """Accepted groups and rejected submissions, newest first; a rejected submission has no groups (all None)."""
        where, values = ["s." + JUDGED], []
        for clause, value in (
            ("n.name = ?", wanted.worker or None),
            ("g.source = ?", wanted.source or None),
            ("g.task = ?", wanted.task),
            ("s.reason = ?", wanted.reason or None),
            ("g.reward >= ?", wanted.reward_min),
            ("g.reward <= ?", wanted.reward_max),
            ("s.version = ?", wanted.version),
        ):
            if value is not None:
                where.append(clause)
                values.append(value)
        kinds = {
            "accepted": "s.state = 'accepted'",
            "rejected": "s.state = 'rejected'",
            "filtered": "s.state = 'accepted' AND NOT g.useful",
            "stale": "g.stale",
        }
        if wanted.verdict:
            where.append(kinds[wanted.verdict])
        if wanted.before:
            where.append("(s.seq < ? OR (s.seq = ? AND coalesce(g.grp, -1) > ?))")
            values += [wanted.before[0], wanted.before[0], wanted.before[1]]
        return self.connection.rows(
            "SELECT s.seq, s.id, g.grp, n.name, s.step, s.version, s.state, s.reason, s.groups, g.reward, g.useful,"
            " g.stale, g.batch, g.tokens, g.task, g.source, g.target, s.judged_s"
            " FROM submissions s JOIN nodes n ON n.key = s.worker LEFT JOIN groups g ON g.submission = s.id"
            f" WHERE {' AND '.join(where)} ORDER BY s.seq DESC, g.grp LIMIT ?",
            *values,
            limit,
        )

    def samples(self, keys: list[str]) -> dict[str, str]:
        """JSON of the samples with these keys (`SUBMISSION/GROUP`) that are still held."""
        if not keys:
            return {}
        marks = ", ".join("?" * len(keys))
        return dict(
            self.connection.rows(f"SELECT key, body FROM history WHERE kind = 'sample' AND key IN ({marks})", *keys)
        )

    def submission(self, seq: int) -> Any:
        """id, worker, validator, step, version, state, reason, verdict, file_hash, accepted_hash, groups, full_check and the
        times of one submission; None if there is none."""
        return self.connection.row(
            "SELECT s.id, w.name, v.name, s.step, s.version, s.state, s.reason, s.verdict, s.file_hash, s.accepted_hash,"
            " s.groups, s.full_check, s.assigned_s, s.uploaded_s, s.judged_s FROM submissions s"
            " JOIN nodes w ON w.key = s.worker LEFT JOIN nodes v ON v.key = s.validator WHERE s.seq = ?",
            seq,
        )

    def group_rows(self, submission: str) -> list[tuple[Any, ...]]:
        """Group, reward, useful, stale, batch, tokens, task, source and target of one accepted submission."""
        return self.connection.rows(
            "SELECT grp, reward, useful, stale, batch, tokens, task, source, target FROM groups WHERE submission = ?"
            " ORDER BY grp",
            submission,
        )

    def worker_names(self) -> list[str]:
        return [name for (name,) in self.connection.rows("SELECT name FROM nodes WHERE role = 'worker' LIMIT 2000")]

    def sources(self) -> list[str]:
        return [name for (name,) in self.connection.rows("SELECT DISTINCT source FROM groups ORDER BY source")]

    # --- ledger ------------------------------------------------------------------------------------------------------

    def entries(self, before: int | None, kind: str, limit: int) -> list[tuple[int, int, str, str]]:
        """Number, time, kind and body, newest first."""
        return self.connection.rows(
            "SELECT seq, time_s, kind, body FROM ledger WHERE seq < ? AND (CAST(? AS TEXT) = '' OR kind = ?)"
            " ORDER BY seq DESC LIMIT ?",
            LAST if before is None else before,
            kind,
            kind,
            limit,
        )

    def newest_entry(self) -> int:
        return int(self.connection.value("SELECT max(seq) FROM ledger") or 0)

    def has_stakes(self, after: int) -> bool:
        """Whether anybody paid a stake in, after this entry."""
        found = self.connection.row(
            "SELECT 1 FROM ledger WHERE seq > ? AND kind IN ('deposited', 'staked') LIMIT 1", after
        )
        return found is not None

    def submission_numbers(self, ids: list[str]) -> dict[str, int]:
        """Sequence numbers of submissions by id."""
        if not ids:
            return {}
        marks = ", ".join("?" * len(ids))
        return dict(self.connection.rows(f"SELECT id, seq FROM submissions WHERE id IN ({marks})", *ids))

    def staked(self) -> dict[str, int]:
        """By node's name: what the coordinator last read in the contract, where that is anything."""
        return dict(self.connection.rows("SELECT name, staked FROM nodes WHERE staked > 0"))

    def names(self) -> dict[str, str]:
        """Node's name by key."""
        return dict(self.connection.rows("SELECT key, name FROM nodes"))
