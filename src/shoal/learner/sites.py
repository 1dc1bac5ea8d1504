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
Called by `shoal learner --site` and `shoal meet`; `PolicySite` also by `sft`. DiLoCo: arXiv 2311.08105.
Left out: several ranks at one site, delayed results, fragments; publishing while sites go on.
"""

import json
import logging
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from blake3 import blake3

from shoal.config import Config
from shoal.config.sites import MeetingSection
from shoal.diloco.agreed import Agreed
from shoal.diloco.fragments import Fragments
from shoal.diloco.messages import ClosedError, Exchange, Figures, Greeting, Outcome, Roster, Terms
from shoal.diloco.site import DifferentError, SilenceError, Site, meet
from shoal.files import commit_folder
from shoal.learner import metrics
from shoal.learner.checkpoint import Progress
from shoal.learner.groups import Fetched, Group, gathering, validators
from shoal.learner.incoming import Incoming
from shoal.learner.loop import Learner
from shoal.learner.policy import Policy
from shoal.learner.record import signed_record
from shoal.model.load import WEIGHTS, save_model
from shoal.protocol.messages import Batch, BatchGroup, Ok, Status, StepReport
from shoal.protocol.node import Node, StoppedError
from shoal.shardcast.format.names import version_name

POLL_S = 0.2
LATE = (ClosedError, DifferentError)  # this site has to take over what the others agreed on

log = logging.getLogger(__name__)


class PolicySite:
    """A policy that is trained at one of several sites."""

    def __init__(
        self, name: str, policy: Policy, terms: Terms, exchange: Exchange, roster: Roster, *, give_up_s: float
    ) -> None:
        self.policy, self.exchange, self.roster, self.give_up_s = policy, exchange, roster, give_up_s
        self.site = Site(name, terms, Agreed.of(policy.masters, terms.fragments))
        self.computed_s = self.waited_s = self.synced_s = 0.0
        self.sent_bytes = self.received_bytes = 0

    def enter(self, about: dict[str, str], why: str) -> int:
        """Join, or join again, and take over what is agreed. Returns the open round. Raises MeetingError."""
        digests = self.site.agreed.digests
        self.roster.join(Greeting(about=about, round=self.site.round, digests=digests))
        round, data = self.exchange.state(why[:400])
        self.received_bytes += len(data)
        self.policy.before_update()  # a checkpoint that is being written holds the masters
        self.site.adopt(self.policy.masters, round, data)
        self.policy.round()
        return round

    def deal(self, stop: threading.Event) -> list[str]:
        """The sites that share the open round, this one among them. Raises ClosedError if it came too late."""
        while not stop.is_set():
            dealt = self.roster.deal(self.site.round)
            if self.site.name in dealt:
                return dealt
            stop.wait(POLL_S)  # not all are here yet; or the round was dealt before this site came, and will end
        raise StoppedError(f"stopped before round {self.site.round} was dealt")

    def meet(self, loss: float | None, stop: threading.Event) -> Outcome:
        """Give what was learned and take what all agreed. Raises ClosedError, DifferentError: `enter` again."""
        digest, data = self.site.offer(self.policy.masters)
        figures = Figures(loss=loss, computed_s=self.computed_s, waited_s=self.waited_s, synced_s=self.synced_s)
        started_s = time.monotonic()
        try:
            outcome, average = meet(
                self.exchange,
                self.site.round,
                digest,
                data,
                figures,
                give_up_s=self.give_up_s,
                stopped=stop.is_set,
            )
        except SilenceError as error:
            if stop.is_set():
                raise StoppedError(str(error)) from error
            raise
        finally:
            self.synced_s += time.monotonic() - started_s
        self.sent_bytes, self.received_bytes = self.sent_bytes + len(data), self.received_bytes + len(average)
        self.policy.before_update()
        self.site.apply(self.policy.masters, outcome, average)
        self.policy.round()
        if why := outcome.left_out.get(self.site.name):
            log.warning("left out of round %d: %s; its moments are dropped", outcome.round, why)
            self.policy.optimizer.state.clear()
        return outcome


class SiteLearner(Learner):
    def __init__(
        self, node: Node, config: Config, policy: Policy, folder: Path, name: str, exchange: Exchange, roster: Roster
    ) -> None:
        """`name`: of this site. `exchange` and `roster`: its ways to the meeting."""
        super().__init__(node, config, policy, folder)
        self.pool = node
        settings = settings_of(config)
        terms = terms_of(settings, config.run.steps, policy)
        self.place = PolicySite(name, policy, terms, exchange, roster, give_up_s=settings.give_up_s)
        self.about = about_of(settings, policy) | {"data": f"run {node.invite.run}"}
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
                    figures = self.train_share(batch, self.place.deal(stop))
                    self.pool.doing(f"the sites of step {progress.step}", waiting=True)
                    outcome = self.place.meet(figures.get("loss"), stop)
                except LATE as error:
                    self.take_over(progress, str(error))
                    continue
                before, counted = progress.version_digest, counting(batch.members, batch.fetched, outcome)
                progress.advance(group.submission for group in counted.groups)
                figures |= self.publish(progress) | self.site_metrics(outcome)
                self.checkpoint(progress)
                synced_s = self.place.synced_s - synced_s
                busy_s = time.monotonic() - started_s - synced_s
                self.report(progress, before, counted, figures, busy_s, waiting_s + synced_s)
            self.leave_model(progress)
            return "finished"
        finally:
            self.checkpoints.finish()
            self.place.roster.leave()

    def take_over(self, progress: Progress, why: str) -> None:
        """Go on from what is agreed: the weights of all sites, with this site's own moments."""
        log.warning("taking over what the sites agreed on: %s", why)
        progress.step = self.place.enter(self.about, why)
        self.publish(progress)
        self.report_again(progress)

    def train_share(self, batch: Incoming, sites: list[str]) -> dict[str, float]:
        """The step's updates on this site's share of the batch. Returns the metrics of training."""
        started_s, mine, self.sharing = time.monotonic(), self.place.site.name, len(sites)
        owner = shares(batch.members, sites)
        groups = [group for group in batch.fetched.groups if owner[_id(group)] == mine]
        nothing = replace(batch.fetched, groups=[])
        found = self.train(groups) if groups else self.skip(batch.step, nothing)
        self.place.computed_s += time.monotonic() - started_s
        return found

    def site_metrics(self, outcome: Outcome) -> dict[str, float]:
        return {
            "sites/kept": float(len(outcome.kept)),
            "sites/lost": float(len(set(outcome.dealt) - set(outcome.kept))),
            "sites/sent_bytes": float(self.place.sent_bytes),
            "sites/received_bytes": float(self.place.received_bytes),
            "sites/synced_s": self.place.synced_s,
        }

    def report_again(self, progress: Progress) -> None:
        """Report the last step if nobody has: all sites that trained it may have died right after it."""
        step = progress.step - 1
        before = self.versions / version_name(max(0, step)) / WEIGHTS
        if step < 0 or not before.exists() or self.pool.get("/v1/status", Status).trained > step:
            return
        batch = self.pool.get(f"/v1/batches/{step}", Batch)
        ended = self.place.exchange.outcome(step)
        assert isinstance(ended, tuple)  # the round is over
        fetched = gathering(self.pool, self.config, self.folder / "quarantine").gather(batch, validators(self.pool))
        counted = counting(batch.groups, fetched, ended[0])
        digest = blake3(max_threads=blake3.AUTO).update_mmap(before).hexdigest()
        report = StepReport(
            step=step,
            metrics=metrics.finite(metrics.batch_metrics(counted, step, max_tokens=self.config.sampling.max_tokens)),
            trained=[group.submission for group in counted.groups],
            record=signed_record(self.pool, step, counted, digest, progress.version_digest, self.policy),
        )
        self.pool.post("/v1/steps", report, Ok)

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


def settings_of(config: Config) -> MeetingSection:
    assert config.learner.sites is not None
    return config.learner.sites


def terms_of(settings: MeetingSection, rounds: int, policy: Policy) -> Terms:
    shapes = {name: tuple(master.shape) for name, master in policy.masters.items()}
    return Terms(Fragments(shapes), rounds=rounds, **settings.terms)


def about_of(settings: MeetingSection, policy: Policy) -> dict[str, str]:
    """What must be equal at all sites beside the data: which parameters travel, and how."""
    shapes = {name: list(master.shape) for name, master in sorted(policy.masters.items())}
    found = {"trained parameters": sha256(json.dumps(shapes).encode()).hexdigest()}
    keys = ("kind", "lr", "momentum", "momentum_warmup")
    return found | {f"sites.{key}": str(getattr(settings, key)) for key in keys}


def _id(group: Group) -> tuple[str, int]:
    return group.submission, group.number
