"""Assigning tasks: which task a worker gets next, or what it has to wait for, and until when it may deliver it.

    nonce = HMAC-SHA256(secret, run, worker, number, version), its first 128 bits

Invariants: a worker works on at most `workers.in_flight` tasks, all of one version, and delivers them in order. So it
cannot skip a task and deliver later ones: when the first is too old, all are. Neither a restart nor older weights give it
different tasks. Their nonces are unpredictable, and each later task is of the same version or a newer one, so a worker
cannot choose among tasks without missing some (see `arrivals`). One more is open while it uploads: it has named that file
by its hash, so later tasks can change nothing in it. Only a worker with accepted work holds more than one task. No task is
given while as much work is under way as the open batch still needs, so queues stay short and rollouts young. While a worker
with accepted work is there, keys without any get none when they hold half of that. A submission is uploaded once, by the
worker it was assigned to and within its grant.

The same assignment always gets the same nonce, also after kill -9, because nothing has to be remembered but the
coordinator's key. Without that key nobody can tell a nonce from random bits. It is in the table of submissions, in the
ledger and in the submitted file, so anyone who has them can derive the tasks again (`tasks.derive`).
Left out: another secret for a coordinator that returns to an older copy of its database. It gives the same numbers the same
nonces again, so a worker knows those tasks which it had already held.
"""

import hashlib
import hmac
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config import Config
from shoal.coordinator.arrivals import Arrivals, usual
from shoal.coordinator.database import Database, PoolError
from shoal.coordinator.nodes import Member
from shoal.coordinator.submissions import Submission
from shoal.coordinator.trust import most_unchecked
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Assignment, Finished

RECENT_GROUPS = 200  # the share of useful groups is estimated from these
LEAST_USEFUL_SHARE = 0.05  # assumed even if fewer groups are useful, so that queues stay bounded
YOUNG_SHARE = 0.5  # of the open batch's work; the most that keys with no accepted work can hold back
NONCE_HEX = 32
DEADLINE_S = 600.0  # after which a worker that lost a task gets another one instead

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Assignments:
    db: Database
    config: Config
    arrivals: Arrivals
    run: str
    secret: bytes  # what nonces are made with (`nonce_secret`)
    deadline_s: float = DEADLINE_S

    def assign(
        self, worker: str, loaded: int | None, uploading: str = "", working_on: Sequence[str] = ()
    ) -> Assignment | str:
        """The next task of a worker that has loaded this version, or what it has to wait for.

        `uploading`, `working_on`: the submissions that it says it uploads and generates.
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
            given = self.db.submissions.newest_version_of(worker)
            if loaded < given:
                return f"this worker to load version {given}"  # switching versions would let it choose
            gone = self._take_back(worker, uploading, oldest_allowed)
            mine = [one for one in self.db.submissions.held_by(worker) if not one.announced]
            lost = [one for one in mine if one.id not in working_on]
            ended = [one for one in mine if one.version != loaded or (one in lost and now_s > one.deadline_s)]
            if gone or ended:
                self.arrivals.missed([*gone, *ended])
            if again := [one for one in lost if one not in ended]:
                return self.describe(again[0])  # the worker restarted: a new task would let it choose
            node = self.db.nodes.get(worker)
            if waits_for := self._holds_enough(worker, node, loaded, oldest_allowed) or _rests(node, now_s):
                return waits_for
            groups = self._wanted(node, step, loaded, newest, now_s)
            if not groups:
                return "the validators and the learner to catch up"
            return self._open(worker, step, loaded, digest, groups, now_s)

    def finished(self, worker: str, upload: Finished) -> None:
        """A worker uploads the oldest task it was working on. It lost what it announced before and has not uploaded yet."""
        held = self.db.submissions.held_by(worker)
        mine, announced = (
            [one for one in held if bool(one.announced) is is_announced] for is_announced in (False, True)
        )
        if not mine or mine[0].id != upload.submission:
            return
        if announced:
            self.arrivals.missed(announced)
        self.db.submissions.announce(mine[0].id, upload.hash)

    def _take_back(self, worker: str, uploading: str, oldest_allowed: int) -> list[Submission]:
        """Ends the wait for an announced file that the worker lost, or that comes too late.

        Returns it if it was lost and its worker knows a later task, which it could deliver instead: it counts as missed.
        """
        held = next((one for one in self.db.submissions.held_by(worker) if one.announced), None)
        if held is None:
            return []
        if uploading == held.id:
            if held.version < oldest_allowed:
                self.arrivals.late(held)
            return []
        if self.db.submissions.next_number(worker) > held.number + 1:
            return [held]
        self.db.submissions.announce(held.id, "")  # it was restarted
        return []

    def _holds_enough(self, worker: str, node: Member | None, loaded: int, oldest_allowed: int) -> str:
        """What the worker has to finish before its next task; "" if nothing.

        A task of newer weights may outlive an older one that is still being uploaded. So it is given only while the older
        version will do for one more step.
        """
        held = self.db.submissions.held_by(worker)
        if not held:
            return ""
        proven = node is not None and node.took_s and not node.missed_in_a_row
        full = len(held) >= self.config.workers.in_flight + any(one.announced for one in held)
        outlives = loaded > held[0].version and held[0].version <= oldest_allowed
        return f"its upload of {held[0].id} to arrive" if full or outlives or not proven else ""

    def _open(self, worker: str, step: int, version: int, digest: str, groups: int, now_s: float) -> Assignment:
        """A new task with this worker's next number."""
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
        """The message that describes a submission's task to its worker and to its validator."""
        return Assignment(
            id=submission.id,
            number=submission.number,
            step=submission.step,
            policy_version=submission.version,
            policy_digest=submission.digest,
            nonce=submission.nonce,
            groups=submission.groups,
            deadline_s=submission.deadline_s,
            upload_path=f"/v1/submissions/{submission.id}",
            max_bytes=self.config.max_submission_bytes,
        )

    def _wanted(self, node: Member | None, step: int, version: int, newest: int, now_s: float) -> int:
        """How many groups this worker's next task holds; 0: enough of them are under way for the open batch.

        More would only grow old in the queue. Open tasks that are late, or whose workers are silent, do not count. While a
        worker with accepted work is there, half of the batch is for such workers, however many young keys hold tasks.

        A worker's own size may be more than is missing: what is left over goes into the next batch. Where the next batch
        could not use it (its version is too old by then, or the run is over), no task holds more than is missing. While the
        learner is still busy, all groups then count as useful, so that nothing is left over.
        """
        section = self.config.coordinator
        keeps = version > step - section.async_level and step + 1 < self.config.run.steps
        recent = self.db.groups.recent_useful_share(RECENT_GROUPS)
        share = max(1.0 if recent is None else recent, LEAST_USEFUL_SHARE)
        if not keeps and newest < step:
            share = 1.0
        need = section.prompts_per_step / share
        waiting = self.db.groups.count_waiting(most_unchecked=most_unchecked(self.config))
        missing = need - waiting / share - self.db.submissions.groups_unjudged()
        proven, young = self.arrivals.groups_open()
        if node is not None and node.took_s:
            missing -= proven + min(young, YOUNG_SHARE * need)
        elif self.db.nodes.has_proven_worker(now_s) and young >= max(
            YOUNG_SHARE * need, self.config.workers.groups_per_submission
        ):
            return 0
        else:
            missing -= proven + young
        size = usual(node, self.config)
        if missing <= 0:
            return 0
        return size if keeps else min(size, math.ceil(missing))

    # --- what the worker delivers ------------------------------------------------------------------------------------

    def may_upload(self, worker: str, id: str, content_hash: str = "") -> Submission:
        """The submission. Raise PoolError unless this worker's grant for it, and for the file with this hash, is valid.

        It is valid while it is the worker's oldest, until no batch can take the version, or the worker takes another task.
        A late upload is not penalised: its task becomes stale here. Another file than the announced one ends the task as
        missed: the worker signed both.
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
            log.info("%s: %s sent another file than it had announced", id, self.db.nodes.name(worker))
            raise PoolError(f"{id} is not the file that was announced, {task.announced[:16]}; take a new task")
        return task

    def uploaded(self, worker: str, id: str, content_hash: str) -> None:
        task = self.may_upload(worker, id, content_hash)  # in no transaction: an error would undo what it records
        self.db.submissions.move(task, "upload", file_hash=content_hash, uploaded_s=self.db.clock())
        log.info("%s uploaded by %s", id, self.db.nodes.name(worker))


def _rests(node: Member | None, now_s: float) -> str:
    """Why the worker gets no new task, by its state or after it missed one; "" if it does."""
    if node is None:
        return ""
    if wait_s := node.suspended_s(now_s):
        return f"its suspension to end in {wait_s:.0f} s ({node.reason})"
    if node.state == "dismissed":
        return f"the pool's operator to readmit it: it was dismissed ({node.reason})"
    if node.state != "active":
        return f"nothing more: it is {node.state} ({node.reason})"
    if node.rests_until_s > now_s:
        return (
            f"its next task in {node.rests_until_s - now_s:.0f} s, because {node.missed_in_a_row} in a row never came"
        )
    return ""


def nonce_secret(identity: Identity) -> bytes:
    """The key of all nonces: it follows from the coordinator's private key and serves nothing else."""
    return hmac.digest(identity.private_key.private_bytes_raw(), b"shoal/assignment-nonces", hashlib.sha256)


def assignment_nonce(secret: bytes, run: str, worker: str, number: int, version: int) -> str:
    name = f"{run}\n{worker}\n{number}\n{version}".encode()
    return hmac.digest(secret, name, hashlib.sha256).hex()[:NONCE_HEX]
