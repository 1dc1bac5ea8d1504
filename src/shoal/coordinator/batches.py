"""Online filtering: accepted groups are credited, and the useful ones of allowed age fill the steps' batches. Useful
is a group whose rewards differ; with `coordinator.online_filter = false`, any.

Invariant: a step's batch never changes once it is full, so a learner that comes back trains on the same groups; and no
group is in two batches.
Called by `submissions` with each acceptance, and by the coordinator for the learner.
Paper: INTELLECT-2 (arXiv 2505.07291), online filtering and asynchronous training.
"""

from collections.abc import Sequence

from shoal.config import Config
from shoal.coordinator.database import Database
from shoal.protocol.messages import Batch, BatchGroup, GroupResult


class Batches:
    def __init__(self, db: Database, config: Config) -> None:
        self.db = db
        self.config = config

    def credit(self, submission: str, version: int, groups: Sequence[GroupResult]) -> None:
        """Take in the groups of a submission that was accepted, made with this version."""
        with self.db.transaction():
            during = self.db.open_step()
            for index, group in enumerate(groups):
                self.db.change(
                    "INSERT INTO groups (submission, grp, version, reward, useful, flat, tokens, during)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    submission,
                    index,
                    version,
                    group.reward_mean,
                    group.useful or not self.config.coordinator.online_filter,
                    not group.useful,
                    group.tokens,
                    during,
                )
            self._fill()

    def of_step(self, step: int) -> Batch:
        """The groups of one step, once it is full."""
        need = self.config.coordinator.prompts_per_step
        if step >= self.config.run.steps:
            return Batch(step=step, ready=False, have=0, need=need, finished=True)
        rows = self.db.all("SELECT submission, grp FROM groups WHERE batch = ? ORDER BY seq", step)
        if len(rows) < need:
            return Batch(step=step, ready=False, have=self.db.waiting(), need=need)
        groups = [BatchGroup(submission=row["submission"], group=row["grp"]) for row in rows]
        return Batch(step=step, ready=True, have=need, need=need, groups=groups)

    def _fill(self) -> None:
        """Close steps while enough useful groups of allowed age are waiting, oldest first."""
        need = self.config.coordinator.prompts_per_step
        while (step := self.db.open_step()) < self.config.run.steps:
            self.db.change(
                "UPDATE groups SET stale = 1 WHERE useful AND batch IS NULL AND version < ?",
                step - self.config.coordinator.async_level,
            )
            waiting = self.db.all(
                "SELECT seq FROM groups WHERE useful AND batch IS NULL AND NOT stale ORDER BY seq LIMIT ?", need
            )
            if len(waiting) < need:
                return
            for group in waiting:
                self.db.change("UPDATE groups SET batch = ? WHERE seq = ?", step, group["seq"])
