"""Online filtering: accepted groups are credited, and useful ones of allowed age fill the steps' batches.

A group is useful if its rewards differ, or always with `coordinator.online_filter = false`; but never if the grader failed
for one of its completions, because that one's reward says nothing of it.

At most `validator.unchecked_share` of a batch are groups of submissions that were not prefilled whole.

Invariant: a full batch never changes, so a learner that restarts trains on the same groups; and no group is in two
batches.
Called by `submissions` for each acceptance, and by the routes for the learner.
Paper: INTELLECT-2 (arXiv 2505.07291), online filtering and asynchronous training.
"""

from collections.abc import Sequence

from shoal.config import Config
from shoal.coordinator.state.database import Database
from shoal.coordinator.trust.checking import most_unchecked
from shoal.protocol.messages import Batch, BatchGroup, GroupResult


class Batches:
    def __init__(self, db: Database, config: Config) -> None:
        self.db = db
        self.config = config

    def credit(
        self, submission: str, version: int, groups: Sequence[GroupResult], *, checked: bool = True
    ) -> list[int]:
        """Add the groups of an accepted submission. Returns the steps whose batches became full.

        `checked`: it was prefilled whole.
        """
        with self.db.transaction():
            step = self.db.open_step()
            for index, group in enumerate(groups):
                self.db.groups.add(
                    submission,
                    index,
                    group,
                    version=version,
                    useful=self._is_useful(group),
                    checked=checked,
                    accepted_during=step,
                )
            return self._fill()

    def of_step(self, step: int) -> Batch:
        """The groups of one step if its batch is full, else how many there are.

        With `learner.stream`, the open batch also names those that it would hold now. They come in the order of the full
        batch, but may be withdrawn until then.
        """
        need = self.config.coordinator.prompts_per_step
        found = self.db.groups.of_batch(step)
        if len(found) < need:
            if self.config.learner.stream and step == self.db.open_step():
                found = [(submission, group) for _, submission, group in self._waiting(need)]
            return Batch(step=step, ready=False, have=self.count_waiting(), need=need, groups=_named(found))
        return Batch(step=step, ready=True, have=need, need=need, groups=_named(found))

    def count_waiting(self) -> int:
        """Groups that the open batch could take now."""
        return self.db.groups.count_waiting(most_unchecked=most_unchecked(self.config))

    def _is_useful(self, group: GroupResult) -> bool:
        return not group.outcomes.grader_error and (group.useful or not self.config.coordinator.online_filter)

    def _fill(self) -> list[int]:
        """Fill batches while enough useful groups of allowed age are waiting, oldest first."""
        need = self.config.coordinator.prompts_per_step
        filled: list[int] = []
        while (step := self.db.open_step()) < self.config.run.steps:
            self.db.groups.mark_stale(older_than=step - self.config.coordinator.async_level)
            waiting = self._waiting(need)
            if len(waiting) < need:
                break
            for seq, _, _ in waiting:
                self.db.groups.put_in_batch(seq, step)
            self.db.ledger.append("batch", {"step": step, "groups": self.db.groups.of_batch(step)})
            filled.append(step)
        return filled

    def _waiting(self, most: int) -> list[tuple[int, str, int]]:
        return self.db.groups.oldest_waiting(most, most_unchecked=most_unchecked(self.config))


def _named(members: Sequence[tuple[str, int]]) -> list[BatchGroup]:
    return [BatchGroup(submission=submission, group=group) for submission, group in members]
