"""Task assignment: which task a worker gets next, or why it must wait, and until when it may upload the result.

    nonce = HMAC-SHA256(secret, run, worker, number, version), truncated to 128 bits

Invariants: a worker generates at most `workers.in_flight` tasks at a time, all of one version, and uploads them in
order. It cannot skip a task and upload later ones, because all its tasks become too old at the same time. It cannot get
different tasks by restarting or by loading older weights. Nonces are unpredictable, and each later task is of the
same version or a newer one. So if a worker picks among its tasks, the others count as missed (see `arrivals`). While a
worker uploads a file, one more task may be open. That task cannot influence the file, because the file's hash was
announced first. Only a worker with accepted work has more than one task. No task is assigned while enough work for the
open batch is in progress, so queues stay short. While a worker with accepted work is live, keys without accepted work
get at most half of the open batch's work. A submission is uploaded once, by its worker, while `may_upload` allows it.

A nonce depends only on the assignment and the coordinator's key, so an assignment keeps its nonce even after kill -9.
Without that key, a nonce is indistinguishable from random bits. Nonces are stored in the table of submissions, the
ledger and the submitted files, so anyone with one of these can derive the tasks again (`tasks.derive`).
Left out: changing the key when the database is restored from an older copy. The coordinator then assigns some numbers a
second time with the same nonces, so a worker may already know those tasks.
"""

import hashlib
import hmac
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config import Config
from shoal.coordinator.arrivals import Arrivals, usual_size
from shoal.coordinator.database import Database, PoolError
from shoal.coordinator.nodes import Member
from shoal.coordinator.submissions import Submission
from shoal.coordinator.trust import max_unchecked
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Assignment, Finished

RECENT_GROUPS = 200  # how many of the newest groups are used to estimate the share of useful groups
MIN_USEFUL_SHARE = 0.05  # smallest share that is assumed, so that queues stay bounded
NEWCOMER_SHARE = 0.5  # largest share of the open batch's work that keys without accepted work may have
NONCE_HEX = 32
DEADLINE_S = 600.0  # after this time, a worker that lost a task gets a different one

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Assignments:
    db: Database
    config: Config
    arrivals: Arrivals
    run: str
    secret: bytes  # HMAC key of the nonces (`nonce_secret`)
    deadline_s: float = DEADLINE_S

    def assign(
        self, worker: str, loaded: int | None, uploading: str = "", working_on: Sequence[str] = ()
    ) -> Assignment | str:
        """Return the worker's next task, or what it must wait for. `loaded`: the version that the worker has loaded.

        `uploading`, `working_on`: the submissions that the worker reports it is uploading and generating.
        """
        with self.db.transaction():
            now_s = self.db.clock()
            step, newest = self.db.open_step(), self.db.policies.newest()
            oldest_allowed = step - self.config.coordinator.async_level
            if step >= self.config.run.steps:
                return "the learner to train the run's last steps: every batch is full"
            if newest is None or newest < oldest_allowed:
                return f"the learner to publish version {max(oldest_allowed, 0)}"
            if loaded is None or loaded < oldest_allowed:
                return f"this worker to load version {newest}"
            digest = self.db.policies.digest(loaded)
            if digest is None:
                return f"version {loaded}, which this worker reports as loaded, to be published"
            assigned = self.db.submissions.newest_version_of(worker)
            if loaded < assigned:
                return f"this worker to load version {assigned}"  # with two versions, it could choose a task
            lost_uploads = self._check_announced(worker, uploading, oldest_allowed)
            tasks = [task for task in self.db.submissions.held_by(worker) if not task.announced]
            lost = [task for task in tasks if task.id not in working_on]
            missed = [task for task in tasks if task.version != loaded or (task in lost and now_s > task.deadline_s)]
            if lost_uploads or missed:
                self.arrivals.missed([*lost_uploads, *missed])
            if resumed := [task for task in lost if task not in missed]:
                return self.describe(resumed[0])  # the worker restarted; with a new task, it could choose between two
            node = self.db.nodes.get(worker)
            if reason := self._why_busy(worker, node, loaded, oldest_allowed) or _why_resting(node, now_s):
                return reason
            groups = self._next_size(node, step, loaded, newest, now_s)
            if not groups:
                return "the validators and the learner to catch up"
            return self._open(worker, step, loaded, digest, groups, now_s)

    def finished(self, worker: str, upload: Finished) -> None:
        """Record that a worker starts to upload its oldest task. A file that it announced earlier counts as missed."""
        held = self.db.submissions.held_by(worker)
        tasks, announced = (
            [task for task in held if bool(task.announced) is is_announced] for is_announced in (False, True)
        )
        if not tasks or tasks[0].id != upload.submission:
            return
        if announced:
            self.arrivals.missed(announced)
        self.db.submissions.announce(tasks[0].id, upload.hash)

    def _check_announced(self, worker: str, uploading: str, oldest_allowed: int) -> list[Submission]:
        """Stop waiting for an announced file that the worker lost, or whose version is too old.

        If the worker lost the file but already has a later task, return the file's task, which counts as missed.
        """
        held = next((task for task in self.db.submissions.held_by(worker) if task.announced), None)
        if held is None:
            return []
        if uploading == held.id:
            if held.version < oldest_allowed:
                self.arrivals.late(held)
            return []
        if self.db.submissions.next_number(worker) > held.number + 1:
            return [held]
        self.db.submissions.announce(held.id, "")  # the worker restarted, so it gets the same task again
        return []

    def _why_busy(self, worker: str, node: Member | None, loaded: int, oldest_allowed: int) -> str:
        """Return what the worker must finish before its next task; "" if nothing.

        While the worker uploads a file of an older version, it gets a task of a newer one only if the older version
        stays allowed for at least one more step.
        """
        held = self.db.submissions.held_by(worker)
        if not held:
            return ""
        proven = node is not None and node.took_s and not node.missed_in_a_row
        full = len(held) >= self.config.workers.in_flight + any(task.announced for task in held)
        outlives = loaded > held[0].version and held[0].version <= oldest_allowed
        return f"its upload of {held[0].id} to arrive" if full or outlives or not proven else ""

    def _open(self, worker: str, step: int, version: int, digest: str, groups: int, now_s: float) -> Assignment:
        """Create a task with this worker's next number."""
        number = self.db.submissions.next_number(worker)
        task = Submission(
            id=f"{worker[:16]}-{number:06d}",
            worker=worker,
            number=number,
            step=step,
            version=version,
            digest=digest,
            groups=groups,
            nonce=assignment_nonce(self.secret, self.run, worker, number, version),
            assigned_s=now_s,
            deadline_s=now_s + self.deadline_s,
        )
        self.db.submissions.add(task)
        return self.describe(task)

    def describe(self, submission: Submission) -> Assignment:
        """Return the message that describes a submission's task to its worker and its validator."""
        return Assignment(
            id=submission.id,
            number=submission.number,
            step=submission.step,
            policy_version=submission.version,
            policy_digest=submission.digest,
            nonce=submission.nonce,
            groups=submission.groups,
            upload_path=f"/v1/submissions/{submission.id}",
        )

    def _next_size(self, node: Member | None, step: int, version: int, newest: int, now_s: float) -> int:
        """Return the number of groups of this worker's next task; 0 if enough groups are in progress.

        More groups would only grow stale in the queue. Late tasks, and those of silent workers, do not count as in
        progress. While a worker with accepted work is live, half of the batch is reserved for such workers.

        A task of the worker's usual size may be larger than the batch needs, because the rest goes into the next batch.
        If the next batch cannot use the rest, because the version will be too old or the run will be over, the task is
        no larger than needed. If the learner has also not yet published version `step`, all groups count as useful, so
        that no group is left over.
        """
        section = self.config.coordinator
        fits_next_batch = version > step - section.async_level and step + 1 < self.config.run.steps
        recent = self.db.groups.recent_useful_share(RECENT_GROUPS)
        share = max(1.0 if recent is None else recent, MIN_USEFUL_SHARE)
        if not fits_next_batch and newest < step:
            share = 1.0
        need = section.prompts_per_step / share
        waiting = self.db.groups.count_waiting(max_unchecked=max_unchecked(self.config))
        missing = need - waiting / share - self.db.submissions.groups_unjudged(now_s)
        proven, new = self.arrivals.groups_open()
        if node is not None and node.took_s:
            missing -= proven + min(new, NEWCOMER_SHARE * need)
        elif self.db.nodes.has_proven_worker(now_s) and new >= max(
            NEWCOMER_SHARE * need, self.config.workers.groups_per_submission
        ):
            return 0
        else:
            missing -= proven + new
        size = usual_size(node, self.config)
        if missing <= 0:
            return 0
        return size if fits_next_batch else min(size, math.ceil(missing))

    # --- uploads -----------------------------------------------------------------------------------------------------

    def may_upload(self, worker: str, id: str, content_hash: str = "") -> Submission:
        """Return the submission. Raise PoolError unless this worker may upload the file with this hash for it.

        The worker may upload while this is its oldest open task and a batch can still take the task's version. If the
        version is too old, the task becomes stale, without a penalty. A file other than the announced one ends the task
        as missed, because the worker signed both the announcement and the upload.
        """
        task = self.db.submissions.get(id)
        if task is None:
            raise PoolError(f"no submission {id}", 404)
        if task.worker != worker:
            raise PoolError(f"{id} is another worker's task", 403)
        if task.state != "open":
            raise PoolError(f"{id} is {task.state}, not open for upload")
        if task.version < (oldest := self.db.open_step() - self.config.coordinator.async_level):
            self.arrivals.late(task)
            raise PoolError(f"{id} is of version {task.version}, older than {oldest}; take a new task")
        if (first := self.db.submissions.held_by(worker)[0]).id != id:
            raise PoolError(f"{id} comes after {first.id}, which has to be uploaded first")
        if content_hash and task.announced not in ("", content_hash):
            with self.db.transaction():
                self.arrivals.missed([task])
            log.info("%s: %s sent a different file from the one it announced", id, self.db.nodes.name(worker))
            raise PoolError(f"{id} is not the file that was announced, {task.announced[:16]}; take a new task")
        return task

    def uploaded(self, worker: str, id: str, content_hash: str) -> None:
        # not in a transaction, because an error would undo what `may_upload` wrote
        task = self.may_upload(worker, id, content_hash)
        self.db.submissions.move(task, "upload", file_hash=content_hash, uploaded_s=self.db.clock())
        log.info("%s uploaded by %s", id, self.db.nodes.name(worker))


def _why_resting(node: Member | None, now_s: float) -> str:
    """Return what the worker must wait for because of its state or its missed tasks; "" if nothing."""
    if node is None:
        return ""
    if wait_s := node.suspended_s(now_s):
        return f"its suspension to end in {wait_s:.0f} s ({node.reason})"
    if node.state == "dismissed":
        return f"the pool's operator to readmit it: it was dismissed ({node.reason})"
    if node.state != "active":
        return f"nothing more: it is {node.state} ({node.reason})"
    if node.rests_until_s > now_s:
        wait_s = node.rests_until_s - now_s
        return f"its next task in {wait_s:.0f} s, because of missed tasks in a row: {node.missed_in_a_row}"
    return ""


def nonce_secret(identity: Identity) -> bytes:
    """Derive the key of all nonces from the coordinator's private key. The derived key has no other use."""
    return hmac.digest(identity.private_key.private_bytes_raw(), b"shoal/assignment-nonces", hashlib.sha256)


def assignment_nonce(secret: bytes, run: str, worker: str, number: int, version: int) -> str:
    name = f"{run}\n{worker}\n{number}\n{version}".encode()
    return hmac.digest(secret, name, hashlib.sha256).hex()[:NONCE_HEX]
