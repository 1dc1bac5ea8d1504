"""Assigning tasks: which task a worker gets next, or what it has to wait for.

Invariant: a worker has at most one open task, and neither a restart nor older weights give it a different one. The pool
never assigns more work than the open batch still needs, so queues stay short and rollouts young.
Called by `members` with a worker's heartbeat. The problems and seeds of a task are derived from it (`tasks.derive`), not
chosen here. Left out: more work for faster workers.
"""

from shoal.config import Config
from shoal.coordinator.curriculum import Curriculum
from shoal.coordinator.database import Database
from shoal.coordinator.tables.submissions import Submission
from shoal.protocol.messages import Assignment

RECENT_GROUPS = 200  # the share of useful groups is estimated from these
LEAST_USEFUL_SHARE = 0.05  # assumed even if fewer groups are useful, so that queues stay bounded


class Assignments:
    def __init__(self, db: Database, config: Config, curriculum: Curriculum) -> None:
        self.db = db
        self.config = config
        self.curriculum = curriculum

    def assign(self, worker: str, loaded: int | None) -> Assignment | str:
        """The next task of a worker that has loaded this version, or what it has to wait for."""
        with self.db.transaction():
            now_s = self.db.clock()
            self.db.submissions.expire_overdue(now_s)
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
            mine = self.db.submissions.open_of(worker)
            if mine is not None and mine.version == loaded:
                return self.describe(mine)  # the worker restarted: a new task would let it choose
            if mine is not None and loaded < mine.version:
                return f"this worker to load version {mine.version}"  # switching versions would let it choose
            if mine is not None:
                self.db.submissions.expire_open_of(worker)
            if self._enough_under_way():
                return "the validators and the learner to catch up"
            return self._open(worker, step, loaded, digest, now_s)

    def _open(self, worker: str, step: int, version: int, digest: str, now_s: float) -> Assignment:
        """A new task with this worker's next number."""
        number = self.db.submissions.next_number(worker)
        id, deadline_s = f"{worker[:16]}-{number:06d}", now_s + self.config.coordinator.task_deadline_s
        added = self.db.submissions.add(id, worker, number, step, version, digest, deadline_s)
        return self.describe(added)

    def describe(self, submission: Submission) -> Assignment:
        """The message that describes a submission's task to its worker and to its validator."""
        return Assignment(
            id=submission.id,
            number=submission.number,
            step=submission.step,
            policy_version=submission.version,
            policy_digest=submission.digest,
            groups=self.config.workers.groups_per_submission,
            curriculum=self.curriculum.digest(submission.step),
            deadline_s=submission.deadline_s,
            upload_path=f"/v1/submissions/{submission.id}",
            max_bytes=self.config.coordinator.max_submission_bytes,
        )

    def _enough_under_way(self) -> bool:
        """Whether the submissions without a verdict will fill the open batch, at the recent share of useful groups.

        More would only grow old in the queue. Open tasks of silent workers do not count.
        """
        under_way = self.db.submissions.count_under_way(self.db.clock() - self.config.coordinator.node_timeout_s)
        recent = self.db.groups.recent_useful_share(RECENT_GROUPS)
        share = max(1.0 if recent is None else recent, LEAST_USEFUL_SHARE)
        expected = self.db.groups.count_waiting() + share * under_way * self.config.workers.groups_per_submission
        return expected >= self.config.coordinator.prompts_per_step
