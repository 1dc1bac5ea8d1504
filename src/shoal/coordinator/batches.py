"""Batches of accepted groups, and what the trusted roles report of them: published versions, trained steps, accuracies.

A group is useful if its rewards differ, or always with `coordinator.online_filter = false`; but never if the grader failed
for one of its completions, because that one's reward says nothing of it. Useful ones of allowed age fill the steps' batches.
At most UNCHECKED_SHARE (`trust`) of a batch are groups of submissions that were not prefilled whole. `learner/groups`
says what the learner then leaves out.

Invariants: a full batch never changes, so a learner that restarts trains on the same groups; and no group is in two
batches. A version keeps its digest; a repeated report, as after a restart, counts once. In a step's figures all accepted
groups count, also those that the learner never saw; one that is unknown is left out (docs/pages.md names them).
Paper: INTELLECT-2 (arXiv 2505.07291), online filtering and asynchronous training.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence

from shoal.config import Config
from shoal.coordinator.database import Database, PoolError
from shoal.coordinator.groups import Scored
from shoal.coordinator.trust import most_unchecked
from shoal.ledger.chain import JSON
from shoal.protocol.messages import Batch, BatchGroup, Evaluation, GroupResult, PolicyVersion, StepReport

log = logging.getLogger(__name__)


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
        """The groups of one step if its batch is full, else how many there are."""
        need = self.config.coordinator.prompts_per_step
        found = self.db.groups.of_batch(step)
        if len(found) < need:
            return Batch(step=step, ready=False, have=self.count_waiting(), need=need, groups=[])
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


class Learning:
    def __init__(self, db: Database, config: Config, close: Callable[[], None]) -> None:
        """`close`: what is still to be settled when the last step is trained."""
        self.db = db
        self.config = config
        self._close = close

    def published(self, policy: PolicyVersion) -> None:
        """Record a published version. Raises PoolError if it was published with another digest."""
        with self.db.transaction():
            digest = self.db.policies.digest(policy.version)
            if digest is not None:
                if digest != policy.digest:
                    raise PoolError(f"version {policy.version} was published with another digest")
                return
            self.db.policies.add(policy.version, policy.digest, policy.size_bytes, self.db.clock())
            self.db.ledger.append("policy", {"version": policy.version, "digest": policy.digest})
        log.info(
            "version %d published, %.1f MB, digest %s", policy.version, policy.size_bytes / 1e6, policy.digest[:16]
        )

    def trained(self, report: StepReport) -> None:
        """Record one step's metrics, with those of all groups accepted while it was open, useless ones included."""
        figures = judged(self.db, report.step)
        metrics = {"step": float(report.step), "time_s": self.db.clock()} | report.metrics | figures
        with self.db.transaction():
            is_first = self.db.history.put("step", str(report.step), json.dumps(metrics))
            if is_first:
                trained: dict[str, JSON] = {
                    "step": report.step,
                    "submissions": sorted(set(report.trained)),
                    "record": report.record,
                }
                self.db.ledger.append("trained", trained)
            if is_first and report.step == self.config.run.steps - 1:
                self._close()
        if is_first:
            reward = f", mean reward {figures['reward/mean']:.3f}" if figures else ""
            log.info("step %d of %d trained%s", report.step + 1, self.config.run.steps, reward)

    def evaluated(self, evaluation: Evaluation) -> None:
        key = f"{evaluation.version} final" if evaluation.final else str(evaluation.version)
        is_first = self.db.history.put("evaluation", key, evaluation.model_dump_json())
        if not is_first:
            return
        accuracies = {"greedy": evaluation.greedy, "sampled": evaluation.sampled}
        shown = ", ".join(f"{kind} {value:.3f}" for kind, value in accuracies.items() if value is not None)
        log.info("version %d evaluated on %d held-out tasks: %s", evaluation.version, evaluation.n, shown)
        if evaluation.final and self.db.is_finished(self.config.run.steps):
            log.info("run finished: all %d steps trained, last version evaluated", self.config.run.steps)


def judged(db: Database, step: int) -> dict[str, float]:
    """What the groups accepted during a step say of rewards, sources and lengths.

    Nothing if groups left over from the step before filled this one at once.
    """
    rewards = db.groups.rewards_during(step)
    if rewards is None:
        return {}
    sources, targets = db.grades.by_source(step), db.grades.by_target(step)
    found = {"reward/mean": rewards[0], "reward/zero_std_frac": rewards[1]}
    if sources:
        rollouts = sum(one.rollouts for one in sources.values())
        found["score/mean"] = sum(one.score_mean * one.rollouts for one in sources.values()) / rollouts
    for source, scored in sources.items():
        found |= dict(_of_source(source, scored))
    found |= {f"part/{source}/{reward}": mean for (source, reward), mean in db.grades.by_part(step).items()}
    for target, scored in targets.items():
        if target:
            found |= dict(_of_target(target, scored))
    if any(targets):
        lost = sum(one.score_mean * one.rollouts - one.reward for one in targets.values())
        found["length_penalty/mean"] = lost / sum(one.rollouts for one in targets.values())
    return found


def _of_source(source: str, scored: Scored) -> Iterator[tuple[str, float]]:
    yield f"reward/{source}/mean", scored.reward_mean
    yield f"score/{source}/mean", scored.score_mean
    yield f"outcome/{source}/wrong_format", scored.wrong_format / scored.rollouts
    yield f"outcome/{source}/grader_error", scored.grader_error / scored.rollouts
    yield f"filtered/{source}", float(scored.filtered)
    yield f"filtered/{source}/all_right", float(scored.all_right)
    yield f"filtered/{source}/all_wrong", float(scored.all_wrong)


def _of_target(target: int, scored: Scored) -> Iterator[tuple[str, float]]:
    yield f"length/{target}/mean", scored.length_mean
    yield f"length/{target}/reward", scored.reward_mean
    yield f"length/{target}/score", scored.score_mean
    yield f"length/{target}/penalty", scored.score_mean - scored.reward_mean


def _named(members: Sequence[tuple[str, int]]) -> list[BatchGroup]:
    return [BatchGroup(submission=submission, group=group) for submission, group in members]
