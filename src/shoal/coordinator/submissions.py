"""What became of a task: uploaded by its worker, claimed by a validator, judged.

Invariant: a submission is uploaded once, by the worker it was handed to and within its grant; only the validator that
holds the claim accepts or rejects it; and it is credited exactly when it is accepted.
Called by the coordinator's routes.
"""

import sqlite3

from shoal.config import Config
from shoal.coordinator.assignments import as_assignment
from shoal.coordinator.batches import Batches
from shoal.coordinator.database import Database, PoolError
from shoal.coordinator.history import HistoryLog
from shoal.coordinator.trust import Trust
from shoal.protocol.messages import HARD, Claim, Claims, ContentOwner, Reason, Verdict, WorkerSample


class Submissions:
    def __init__(self, db: Database, config: Config, batches: Batches, trust: Trust, history: HistoryLog) -> None:
        self.db = db
        self.config = config
        self.batches = batches
        self.trust = trust
        self.history = history

    # --- the worker's side -------------------------------------------------------------------------------------------

    def may_upload(self, worker: str, submission: str) -> None:
        """Raise PoolError unless this worker's grant for this submission is still good."""
        row = self._row(submission)
        if row["worker"] != worker:
            raise PoolError(f"{submission} is another worker's task", 403)
        if row["state"] != "open":
            raise PoolError(f"{submission} is {row['state']}, not open for upload")
        if self.db.clock() > row["deadline_s"]:
            raise PoolError(f"{submission} came after its deadline; take a new task")
        if row["version"] < (oldest := self.db.open_step() - self.config.coordinator.async_level):
            raise PoolError(f"{submission} is of version {row['version']}, older than {oldest}; take a new task")

    def uploaded(self, worker: str, submission: str, content_hash: str) -> None:
        with self.db.transaction():
            self.may_upload(worker, submission)
            self.db.change(
                "UPDATE submissions SET state = 'uploaded', hash = ?, uploaded_s = ? WHERE id = ?",
                content_hash,
                self.db.clock(),
                submission,
            )

    # --- the validator's side ----------------------------------------------------------------------------------------

    def claim(self, validator: str, most: int) -> Claims:
        """Lease the oldest unchecked submission, and up to `most` of the same version; a lease that ran out is given anew.

        Which of them are prefilled is drawn here, after upload, so that no worker can know it.
        """
        with self.db.transaction():
            now_s = self.db.clock()
            rows = self.db.all(
                "SELECT * FROM submissions WHERE state = 'uploaded' OR (state = 'validating' AND"
                " (lease_s < ? OR validator = ?)) ORDER BY seq",
                now_s,
                validator,
            )
            rows = [row for row in rows if row["version"] == rows[0]["version"]][:most]
            lease_s = now_s + self.config.coordinator.claim_lease_s
            claims = []
            for row in rows:
                full = row["full"] if row["full"] is not None else self.trust.draw(row["worker"])
                self.db.change(
                    "UPDATE submissions SET state = 'validating', validator = ?, lease_s = ?, full = ? WHERE id = ?",
                    validator,
                    lease_s,
                    full,
                    row["id"],
                )
                assignment = as_assignment(row, self.config)
                claims.append(Claim(assignment=assignment, worker=row["worker"], lease_s=lease_s, full=bool(full)))
        return Claims(claims=claims)

    def content_owner(self, content: str) -> ContentOwner:
        """Which judged submission first held these rollouts."""
        row = self.db.one("SELECT id FROM submissions WHERE content = ? ORDER BY seq LIMIT 1", content)
        return ContentOwner(submission=row["id"] if row else None)

    def hashes(self, submission: str) -> tuple[str, str]:
        """Content hashes of the uploaded and of the accepted file, "" where there is none yet."""
        row = self._row(submission)
        return row["hash"] or "", row["accepted_hash"] or ""

    def accepted_stored(self, validator: str, submission: str, content_hash: str) -> None:
        """A validator has stored the accepted file of a submission it holds the claim on."""
        with self.db.transaction():
            self._claimed(validator, submission)
            self.db.change("UPDATE submissions SET accepted_hash = ? WHERE id = ?", content_hash, submission)

    def judge(self, validator: str, verdict: Verdict) -> None:
        """Accept or reject. A hard rejection slashes the worker and evicts it."""
        with self.db.transaction():
            if self.db.one(
                "SELECT 1 FROM submissions WHERE id = ? AND validator = ? AND state IN ('accepted', 'rejected')",
                verdict.submission,
                validator,
            ):
                return  # its answer was lost and it asks again
            row = self._claimed(validator, verdict.submission)
            reason = self._reason(row, verdict)
            if reason is None and (row["accepted_hash"] is None or row["accepted_hash"] != verdict.accepted_hash):
                raise PoolError(f"{row['id']}: store the accepted file before accepting it")
            state = "rejected" if reason else "accepted"
            self.db.change(
                "UPDATE submissions SET state = ?, reason = ?, content = ?, verdict = ?, judged_s = ? WHERE id = ?",
                state,
                reason,
                verdict.content,
                verdict.model_dump_json(exclude={"groups": {"__all__": {"sample"}}}),
                self.db.clock(),
                row["id"],
            )
            entry = {
                "submission": row["id"],
                "worker": row["worker"],
                "step": row["step"],
                "file": row["hash"],
                "full": bool(row["full"]),
            }
            if reason is None:
                self.batches.credit(row["id"], row["version"], verdict.groups)
                self.history.put_samples(self._samples(row, verdict))
                tokens = sum(group.tokens for group in verdict.groups)
                self.db.ledger.append("accepted", entry | {"tokens": tokens, "groups": len(verdict.groups)})
                return
            self.db.ledger.append("rejected", entry | {"reason": reason.value, "detail": verdict.detail})
            if reason in HARD and self._evict(row["worker"]):
                self.db.ledger.append("slashed", entry | {"reason": reason.value})

    def _samples(self, row: sqlite3.Row, verdict: Verdict) -> list[WorkerSample]:
        worker = self.db.one("SELECT name FROM nodes WHERE key = ?", row["worker"])["name"]
        return [
            WorkerSample(
                **group.sample.model_dump(),
                submission=row["id"],
                group=number,
                worker=worker,
                policy_version=row["version"],
            )
            for number, group in enumerate(verdict.groups)
            if group.sample is not None
        ]

    def _reason(self, row: sqlite3.Row, verdict: Verdict) -> Reason | None:
        """Why it is rejected: what the validator found, or what only the pool can know."""
        owner = self.content_owner(verdict.content).submission if verdict.content else None
        if verdict.reason is None and owner not in (None, row["id"]):
            return Reason.REPLAYED  # two validators held copies at the same time
        return verdict.reason

    def _evict(self, worker: str) -> bool:
        """Take a worker's membership, its open task and what of its work was believed unchecked and is not yet in a batch.

        What a validator holds to be believed unchecked goes back into the queue, to be drawn anew: in full, after a
        rejection. False where that was done before.
        """
        if self.db.one("SELECT evicted FROM nodes WHERE key = ?", worker)["evicted"]:
            return False
        self.db.change("UPDATE nodes SET evicted = 1 WHERE key = ?", worker)
        self.db.change("UPDATE submissions SET state = 'expired' WHERE worker = ? AND state = 'open'", worker)
        self.db.change(
            "UPDATE groups SET stale = 1 WHERE useful AND batch IS NULL AND submission IN"
            " (SELECT id FROM submissions WHERE worker = ? AND NOT full)",
            worker,
        )
        self.db.change(
            "UPDATE submissions SET state = 'uploaded', validator = NULL, full = NULL"
            " WHERE worker = ? AND state = 'validating' AND NOT full",
            worker,
        )
        return True

    def _row(self, submission: str) -> sqlite3.Row:
        row = self.db.one("SELECT * FROM submissions WHERE id = ?", submission)
        if row is None:
            raise PoolError(f"no submission {submission}", 404)
        return row  # type: ignore[no-any-return]

    def _claimed(self, validator: str, submission: str) -> sqlite3.Row:
        row = self._row(submission)
        if row["state"] != "validating" or row["validator"] != validator:
            raise PoolError(f"{submission} is {row['state']} and not claimed by this validator")
        return row
