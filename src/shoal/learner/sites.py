"""The learner at one of several sites. A step is a round of the sites' meeting: each site trains on its own share of the
step's batch, and one outer step over all of them makes the next policy version, which is equal at all sites to the last bit.

    deal    the meeting says which n sites share the batch: group i goes to site i mod n, so every group has one site
    train   `learner.optimizer_steps_per_step` updates on this site's share
    meet    send what this site learned, and continue from the agreed state

Who publishes: the meeting (`Publisher`), which holds what is agreed and is restarted without loss. So no site's death holds
a version back. Each site writes the same version for itself too, for its own record. Each reports the step; the coordinator
takes the first report.
Invariant: a site's masters are what all agree on whenever a step begins. What a site learned and could not give in time is
dropped, with the reason in the log and in the meeting's `rounds.jsonl`.
Called by `shoal learner --site` and `shoal meet`. Left out: publishing while sites go on.
"""

import logging
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from blake3 import blake3

from shoal.config import Config
from shoal.diloco.agreed import Agreed, Fragments
from shoal.diloco.messages import Exchange, Outcome, Roster, Terms
from shoal.files import commit_folder
from shoal.learner import metrics
from shoal.learner.checkpoint import Progress
from shoal.learner.groups import Fetched, Group, gathering, validators
from shoal.learner.incoming import Incoming
from shoal.learner.loop import Learner
from shoal.learner.policy import Policy
from shoal.learner.record import signed_record
from shoal.learner.site_policy import LATE, PolicySite, Way, about_of, terms_of
from shoal.model.load import WEIGHTS, save_model
from shoal.protocol.messages import Batch, BatchGroup, Ok, Status, StepReport
from shoal.protocol.node import Node
from shoal.shardcast.manifest import version_name

log = logging.getLogger(__name__)


class SiteLearner(Learner):
    def __init__(
        self,
        node: Node | None,
        config: Config,
        policy: Policy,
        folder: Path,
        name: str,
        exchange: Exchange | None,
        roster: Roster | None,
    ) -> None:
        """`name`: of this site. `exchange` and `roster`: its leader's ways to the meeting; like `node`, None elsewhere."""
        super().__init__(node, config, policy, folder)
        settings, terms = config.sites, learner_terms(config, policy)
        self.place = PolicySite(name, policy, terms, exchange, roster, give_up_s=settings.give_up_s)
        self.about = about_of(settings, policy) | ({"data": f"run {node.invite.run}"} if node else {})
        self.sharing = 1  # sites that shared the last batch

    def run(self, stop: threading.Event) -> str:
        """Train until the last step or until `stop`. Returns "finished" or "stopped"."""
        progress = self.checkpoints.restore()
        try:
            self.take_over(progress, "it comes back" if progress.step else "it joins")
            while progress.step < self.config.run.steps:
                synced_s = self.place.synced_s
                batch = self.batch(progress.step, [], stop)
                if batch is None:
                    return "stopped"
                started_s, waiting_s = time.monotonic(), batch.waited_s
                self.place.waited_s += waiting_s
                try:
                    figures = self.train_share(batch, stop)
                    if self.node:
                        self.node.doing(f"the sites of step {progress.step}", waiting=True)
                    outcome = self.place.meet(figures.get("loss"), stop)
                except LATE as error:
                    self.take_over(progress, str(error))
                    continue
                before = progress.version_digest
                counted = counting(batch.members, batch.fetched, outcome) if self.node else batch.fetched
                progress.advance(group.submission for group in counted.groups)
                figures |= self.publish(progress) | site_metrics(outcome)
                self.checkpoint(progress)
                synced_s = self.place.synced_s - synced_s
                busy_s = time.monotonic() - started_s - synced_s
                self.report(progress, before, counted, figures, busy_s, waiting_s + synced_s)
            self.leave_model(progress)
            return "finished"
        finally:
            self.checkpoints.finish()
            self.place.leave()

    def take_over(self, progress: Progress, why: str) -> None:
        """Go on from what is agreed: the weights of all sites, with this site's own moments."""
        log.warning("taking over what the sites agreed on: %s", why)
        progress.step = self.place.enter(self.about, why)
        self.publish(progress)
        self.report_again(progress)

    def train_share(self, batch: Incoming, stop: threading.Event) -> dict[str, float]:
        """The step's updates on this site's share of the batch. Returns the metrics of training. Raises ClosedError."""
        sites = self.place.deal(stop)

        def pick(way: Way) -> list[int]:
            owner = shares(batch.members, sites)
            return [i for i, group in enumerate(batch.fetched.groups) if owner[_id(group)] == self.place.name]

        groups = [batch.groups[i] for i in self.place.agree(pick)]
        started_s, self.sharing = time.monotonic(), len(sites)
        nothing = replace(batch.fetched, groups=[])
        found = self.train(groups) if groups else self.skip(batch.step, nothing)
        self.place.computed_s += time.monotonic() - started_s
        return found

    def report_again(self, progress: Progress) -> None:
        """Report the last step if nobody has: all sites that trained it may have died right after it."""
        step = progress.step - 1
        if self.node is None or self.place.way is None:
            return
        before = self.versions / version_name(max(0, step)) / WEIGHTS
        if step < 0 or not before.exists() or self.node.get("/v1/status", Status).trained > step:
            return
        batch = self.node.get(f"/v1/batches/{step}", Batch)
        ended = self.place.way.exchange.outcome(step)
        assert isinstance(ended, tuple)  # the round is over
        fetched = gathering(self.node, self.config, self.folder / "quarantine").gather(batch, validators(self.node))
        counted = counting(batch.groups, fetched, ended[0])
        figures = metrics.batch_metrics(counted, step, max_tokens=self.config.sampling.max_tokens)
        digest = blake3(max_threads=blake3.AUTO).update_mmap(before).hexdigest()
        report = StepReport(
            step=step,
            metrics=metrics.finite(figures | site_metrics(ended[0])),
            trained=[group.submission for group in counted.groups],
            record=signed_record(self.node, step, counted, digest, progress.version_digest, self.policy),
        )
        self.node.post("/v1/steps", report, Ok)

    def _flops(self, groups: list[Group]) -> float:
        return super()._flops(groups) / self.sharing  # of this site alone


class Publisher:
    """Writes what the sites agree on as policy versions, for the origin. The meeting calls it after every round."""

    def __init__(self, policy: Policy, fragments: Fragments, versions: Path, keep: int) -> None:
        self.policy, self.fragments, self.versions, self.keep = policy, fragments, versions, keep

    def __call__(self, round: int, agreed: Agreed) -> None:
        """Version `round` is the state before that round. One that was published stays as it is."""
        final = self.versions / version_name(round)
        if final.exists():
            return
        for number, values in enumerate(agreed.parameters):
            self.fragments.scatter_(self.policy.masters, number, values)
        self.policy.round()
        temporary = final.with_name(f".{final.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        policy = self.policy
        save_model(policy.model, policy.tokenizer, temporary, policy.published(), policy.stored)
        commit_folder(temporary, final)
        log.info("version %d is written to %s", round, final)
        for old in sorted(self.versions.glob("v*"))[: -self.keep]:
            shutil.rmtree(old)


def shares(batch: Sequence[BatchGroup], sites: Sequence[str]) -> dict[tuple[str, int], str]:
    """Which site trains each group of a batch: the same at all sites, because a full batch never changes."""
    return {(group.submission, group.group): sites[i % len(sites)] for i, group in enumerate(batch)}


def counting(batch: Sequence[BatchGroup], fetched: Fetched, outcome: Outcome) -> Fetched:
    """The batch without the groups of sites that had no part in the round's average."""
    owner = shares(batch, outcome.dealt)
    return replace(fetched, groups=[group for group in fetched.groups if owner[_id(group)] in outcome.kept])


def site_metrics(outcome: Outcome) -> dict[str, float]:
    """How the round went: whose share is in the version, and what each site says of itself (docs/metrics.md)."""
    found = {
        "sites/kept": float(len(outcome.kept)),
        "sites/lost": float(len(set(outcome.dealt) - set(outcome.kept))),
    }
    for name in sorted({*outcome.kept, *outcome.left_out, *outcome.missing}):
        found[f"sites/{name}/kept"] = float(name in outcome.kept)
        found[f"sites/{name}/left_out"] = float(name in outcome.left_out)
    for name, figures in outcome.figures.items():
        told = figures.model_dump(exclude_none=True)
        found |= {f"sites/{name}/{key}": float(value) for key, value in told.items()}
    return found


def learner_terms(config: Config, policy: Policy) -> Terms:
    """A round deals the groups of a batch."""
    groups = config.coordinator.prompts_per_step
    return terms_of(config.sites, config.run.steps, policy, lambda _: groups)


def _id(group: Group) -> tuple[str, int]:
    return group.submission, group.number
