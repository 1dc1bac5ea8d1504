"""Batches of accepted groups, and reports by the trusted roles: published versions, trained steps, evaluations.

A group is useful if its rewards differ and no grader error occurred in it, because the reward of a completion with a
grader error means nothing. With `coordinator.online_filter = false`, groups with equal rewards are useful too. Useful
groups of allowed age fill the steps' batches, oldest first. At most UNCHECKED_SHARE (`trust`) of a batch comes from
submissions that were not prefilled whole. `learner/groups` describes which groups of a batch the learner leaves out.

Invariants: a full batch never changes, so a restarted learner trains on the same groups. No group is in two batches. A
version keeps its digest. A repeated report, for example after a restart, counts once. A step's metrics cover all
accepted groups, including those that the learner never saw. A metric without a value is omitted (docs/pages.md lists
the metrics).
Paper: INTELLECT-2 (arXiv 2505.07291), online filtering and asynchronous training.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence

from shoal.config import Config
from shoal.coordinator.database import Database, PoolError
from shoal.coordinator.groups import Scored
from shoal.coordinator.trust import max_unchecked
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
        """Add the groups of an accepted submission. Return the steps whose batches became full.

        `checked`: whether the submission was prefilled whole.
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
        """Return the groups of a step's batch if it is full, else an empty batch that is not ready."""
        groups = self.db.groups.of_batch(step)
        if len(groups) < self.config.coordinator.prompts_per_step:
            return Batch(step=step, ready=False)
        members = [BatchGroup(submission=submission, group=group) for submission, group in groups]
        return Batch(step=step, ready=True, groups=members)

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

    def _waiting(self, limit: int) -> list[tuple[int, str, int]]:
        return self.db.groups.oldest_waiting(limit, max_unchecked=max_unchecked(self.config))


class Learning:
    def __init__(self, db: Database, config: Config, close: Callable[[], None]) -> None:
        """`close` is called when the last step is trained, to settle pending verdicts and credit."""
        self.db = db
        self.config = config
        self._close = close

    def published(self, policy: PolicyVersion) -> None:
        """Record a published version. Raise PoolError if it was published with another digest."""
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

    def reported(self, report: StepReport) -> None:
        """Record a trained step. Raise PoolError if its batch is not full."""
        if report.step >= self.db.open_step():
            raise PoolError(f"step {report.step + 1} cannot have been trained, because its batch is not full")
        self.trained(report)

    def trained(self, report: StepReport) -> None:
        """Record one step's metrics, and the metrics of all groups accepted while the step was open."""
        scores = score_metrics(self.db, report.step)
        metrics = {"step": float(report.step), "time_s": self.db.clock()} | report.metrics | scores
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
            reward = f", mean reward {scores['reward/mean']:.3f}" if scores else ""
            log.info("step %d of %d trained%s", report.step + 1, self.config.run.steps, reward)

    def evaluated(self, evaluation: Evaluation) -> None:
        """Record an evaluation. Raise PoolError if its version is not published."""
        if self.db.policies.digest(evaluation.version) is None:
            raise PoolError(f"version {evaluation.version} is not published")
        key = f"{evaluation.version} final" if evaluation.final else str(evaluation.version)
        is_first = self.db.history.put("evaluation", key, evaluation.model_dump_json())
        if not is_first:
            return
        accuracies = {"greedy": evaluation.greedy, "sampled": evaluation.sampled}
        shown = ", ".join(f"{kind} {value:.3f}" for kind, value in accuracies.items() if value is not None)
        log.info("version %d evaluated on %d held-out tasks: %s", evaluation.version, evaluation.n, shown)
        if evaluation.final and self.db.is_finished(self.config.run.steps):
            log.info("run finished: all %d steps trained, last version evaluated", self.config.run.steps)


def score_metrics(db: Database, step: int) -> dict[str, float]:
    """Return metrics of rewards, sources and lengths of the groups accepted while a step was open.

    Return no metrics if no group was accepted, which can happen when groups left over from earlier steps fill the batch
    at once.
    """
    rewards = db.groups.rewards_during(step)
    if rewards is None:
        return {}
    sources, targets = db.grades.by_source(step), db.grades.by_target(step)
    metrics = {"reward/mean": rewards[0], "reward/zero_std_frac": rewards[1]}
    if sources:
        rollouts = sum(scored.rollouts for scored in sources.values())
        metrics["score/mean"] = sum(scored.score_mean * scored.rollouts for scored in sources.values()) / rollouts
    for source, scored in sources.items():
        metrics |= dict(_source_metrics(source, scored))
    metrics |= {f"part/{source}/{reward}": mean for (source, reward), mean in db.grades.by_part(step).items()}
    for target, scored in targets.items():
        if target:
            metrics |= dict(_target_metrics(target, scored))
    if any(targets):
        penalty = sum(scored.score_mean * scored.rollouts - scored.reward for scored in targets.values())
        metrics["length_penalty/mean"] = penalty / sum(scored.rollouts for scored in targets.values())
    return metrics


def _source_metrics(source: str, scored: Scored) -> Iterator[tuple[str, float]]:
    yield f"reward/{source}/mean", scored.reward_mean
    yield f"score/{source}/mean", scored.score_mean
    yield f"outcome/{source}/wrong_format", scored.wrong_format / scored.rollouts
    yield f"outcome/{source}/grader_error", scored.grader_error / scored.rollouts
    yield f"filtered/{source}", float(scored.filtered)
    yield f"filtered/{source}/all_right", float(scored.all_right)
    yield f"filtered/{source}/all_wrong", float(scored.all_wrong)


def _target_metrics(target: int, scored: Scored) -> Iterator[tuple[str, float]]:
    yield f"length/{target}/mean", scored.length_mean
    yield f"length/{target}/reward", scored.reward_mean
    yield f"length/{target}/score", scored.score_mean
    yield f"length/{target}/penalty", scored.score_mean - scored.reward_mean
