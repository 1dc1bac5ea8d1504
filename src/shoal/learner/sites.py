"""The learner at one of several sites (DiLoCo, arXiv 2311.08105). A step is a round of the meeting, which is the server
that averages the sites' results (`diloco/meeting`). Each site trains on its share of the step's batch. Then one outer
step over all sites makes the next policy version, which is bitwise equal at all sites.

    deal    the meeting names the n sites that share the batch, and group i goes to site i mod n
    train   `learner.optimizer_steps_per_step` updates on this site's share
    meet    send this site's pseudo-gradient, and continue from the agreed state

The meeting publishes versions (`Publisher`): it has the agreed state and survives restarts, so a dead site delays no
version. Each site also writes every version for its own record, and reports the step. The coordinator takes the first
report.
Under torchrun a site has several ranks. The leader alone talks to the meeting and has the agreed state. The masters are
gathered on the leader in float32, and the agreed state is scattered to all ranks.
Invariant: when a step starts, a site's masters equal the agreed state. Work that a site offers too late is dropped. The
log and the meeting's `rounds.jsonl` give the reason. All ranks of a site make the same calls and get the same outcome.
Left out: publishing while the sites continue to train.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.config import Config
from shoal.config.sites import SitesSection
from shoal.diloco.agreed import Agreed, Shapes
from shoal.diloco.messages import Figures, RoundClosedError, RoundOutcome, Terms
from shoal.diloco.remote import Remote
from shoal.diloco.site import GIVE_UP_S, Participant, SilenceError
from shoal.files import file_digest
from shoal.learner import report
from shoal.learner.checkpoint import LearnerProgress
from shoal.learner.groups import Fetched, Group, StepBatch, gathering, validators
from shoal.learner.loop import Learner, drop_old_versions
from shoal.learner.policy import Policy
from shoal.learner.ranks import from_leader
from shoal.model.load import WEIGHTS
from shoal.protocol.calling import StoppedError
from shoal.protocol.history import Status
from shoal.protocol.messages import Batch, BatchGroup
from shoal.protocol.node import Node
from shoal.shardcast.manifest import version_name

POLL_S = 0.2
log = logging.getLogger(__name__)


class PolicySite:
    """A policy trained at one of several sites. Every rank of the site must call the same methods."""

    def __init__(self, name: str, policy: Policy, terms: Terms, link: Remote | None) -> None:
        """`link` is the connection to the meeting, and None on ranks other than the leader."""
        self.name, self.policy, self.ranks = name, policy, policy.ranks
        masters = self._gathered()
        self.leader = Participant(name, terms, link, masters) if link else None
        self.spent = self.leader.spent if self.leader else Figures()

    def enter(self, about: dict[str, str], why: str, *, placed: bool = True) -> tuple[int, int]:
        """Join or rejoin, and adopt the agreed state, as `Participant.enter` describes. Raise MeetingError."""
        self.policy.before_update()  # wait for a checkpoint in progress, which reads the masters
        masters = self._gathered()
        round, accepted = self.agree(lambda leader: leader.enter(masters, about, why, placed=placed))
        self._spread(masters)
        return round, accepted

    def deal(self, stop: threading.Event) -> list[str]:
        """Return the sites that share this site's round, itself included.

        Raise RoundClosedError if the round is over, SilenceError after GIVE_UP_S, StoppedError.
        """
        started_s = time.monotonic()

        def ask(leader: Participant) -> list[str]:
            round = leader.site.round
            while not stop.is_set():
                dealt = leader.link.deal(round)
                if self.name in dealt:
                    return dealt
                if time.monotonic() - started_s > GIVE_UP_S:
                    missing = f"{', '.join(dealt)}, which share its work" if dealt else "more sites"
                    raise SilenceError(
                        f"round {round} waited {GIVE_UP_S:.0f} s for {missing}: start missing sites, or lower sites.quorum"
                    )
                stop.wait(POLL_S)  # sites are missing, or the round was dealt without this site
            raise StoppedError(f"stopped before round {round} was dealt")

        try:
            dealt: list[str] = self.agree(ask)
        finally:
            self.spent.synced_s += time.monotonic() - started_s
        return dealt

    def meet(self, loss: float | None, stop: threading.Event) -> RoundOutcome:
        """Offer this site's result and adopt the agreed state. After RoundClosedError, call `enter` again."""
        self.policy.before_update()
        masters, self.spent.loss = self._gathered(), loss
        fields = self.agree(lambda leader: leader.exchange(masters, stop.is_set).model_dump(mode="json"))
        outcome = RoundOutcome.model_validate(fields)
        self._spread(masters)
        if self.name in outcome.left_out:
            self.policy.optimizer.state.clear()
        return outcome

    def leave(self) -> None:
        if self.leader is not None:
            self.leader.link.leave()

    def agree(self, ask: Callable[[Participant], Any]) -> Any:
        """Call `ask` on the leader. On every rank, return its JSON result or raise its RoundClosedError."""

        def read() -> dict[str, Any]:
            assert self.leader is not None
            try:
                return {"result": ask(self.leader)}
            except RoundClosedError as error:
                return {"late": str(error)}

        answer = from_leader(self.ranks, read, lambda answer: json.dumps(answer).encode(), json.loads)
        if "late" in answer:
            raise RoundClosedError(answer["late"])
        return answer["result"]

    def _gathered(self) -> dict[str, Tensor]:
        """With one rank, return the live masters. Otherwise return full copies on the leader's CPU, and {} elsewhere."""
        if self.ranks.size == 1:
            return self.policy.masters
        result = {name: self.ranks.gathered(master, torch.float32) for name, master in self.policy.masters.items()}
        return {name: master for name, master in result.items() if master is not None}

    def _spread(self, masters: Mapping[str, Tensor]) -> None:
        """Set the policy to the leader's `masters`, which `_gathered` returned."""
        if self.ranks.size > 1:
            for name, master in self.policy.masters.items():
                self.ranks.spread_(master, masters.get(name))
        self.policy.round()


class SiteLearner(Learner):
    def __init__(
        self, node: Node | None, config: Config, policy: Policy, folder: Path, name: str, link: Remote | None
    ) -> None:
        """`name` is the site's. `link` is the leader's connection to the meeting; like `node`, it is None elsewhere."""
        super().__init__(node, config, policy, folder)
        settings, terms = config.sites, learner_terms(config, policy)
        self.place = PolicySite(name, policy, terms, link)
        self.about = about_of(settings, policy) | ({"data": f"run {node.invite.run}"} if node else {})
        self.sharing = 1  # sites that shared the last batch

    def run(self, stop: threading.Event) -> str:
        """Train until the last step or until `stop`. Return "finished" or "stopped"."""
        progress = self.checkpoints.restore()
        try:
            self.take_over(progress, "the site comes back" if progress.step else "the site joins")
            while progress.step < self.config.run.steps:
                synced_s = self.place.spent.synced_s
                batch = self.incoming.wait(progress.step, stop)
                if batch is None:
                    return "stopped"
                started_s, waiting_s = time.monotonic(), batch.waited_s
                self.place.spent.waited_s += waiting_s
                try:
                    figures = self.train_share(progress, batch, stop)
                    if self.node:
                        self.node.doing(f"the other sites in step {progress.step + 1}", waiting=True)
                    outcome = self.place.meet(figures.get("loss"), stop)
                except RoundClosedError as error:
                    self.take_over(progress, str(error))
                    continue
                before = progress.version_digest
                counted = without_lost_sites(batch.members, batch.fetched, outcome) if self.node else batch.fetched
                progress.advance(group.submission for group in counted.groups)
                figures |= self.publish(progress) | site_metrics(outcome)
                self.checkpoint(progress)
                synced_s = self.place.spent.synced_s - synced_s
                busy_s = time.monotonic() - started_s - synced_s
                self.report(progress, before, counted, figures, busy_s, waiting_s + synced_s)
            self.export_model(progress)
            return "finished"
        finally:
            self.checkpoints.finish()
            self.place.leave()

    def take_over(self, progress: LearnerProgress, why: str) -> None:
        """Continue from the agreed weights, with this site's own optimizer moments."""
        log.warning("continuing from the weights that the sites agreed on: %s", why)
        progress.step, _ = self.place.enter(self.about, why)
        self.publish(progress)
        self.report_again(progress)

    def train_share(self, progress: LearnerProgress, batch: StepBatch, stop: threading.Event) -> dict[str, float]:
        """Run the step's updates on this site's share of the batch. Return training metrics. Raise RoundClosedError."""
        sites = self.place.deal(stop)

        def pick(_: Participant) -> list[int]:
            owner = shares(batch.members, sites)
            return [i for i, group in enumerate(batch.fetched.groups) if owner[_id(group)] == self.place.name]

        groups = [batch.groups[i] for i in self.place.agree(pick)]
        started_s, self.sharing = time.monotonic(), len(sites)
        result = self.compute(progress, groups, replace(batch.fetched, groups=[]))
        self.place.spent.computed_s += time.monotonic() - started_s
        return result

    def report_again(self, progress: LearnerProgress) -> None:
        """Report the newest step if no site has reported it. This happens if all sites die right after training it."""
        step = progress.step - 1
        if self.node is None or self.place.leader is None:
            return
        before = self.versions / version_name(max(0, step)) / WEIGHTS
        if step < 0 or not before.exists() or self.node.get("/v1/status", Status).trained > step:
            return
        batch = self.node.get(f"/v1/batches/{step}", Batch)
        ended = self.place.leader.link.outcome(step)
        assert isinstance(ended, tuple)  # the round is over
        fetched = gathering(self.node, self.config, self.folder / "quarantine").gather(batch, validators(self.node))
        counted = without_lost_sites(batch.groups, fetched, ended[0])
        figures = report.batch_metrics(counted, step, max_tokens=self.config.sampling.max_tokens)
        digest = file_digest(before)
        self.post(self.node, progress, digest, counted, figures | site_metrics(ended[0]))

    def _flops(self, groups: list[Group]) -> float:
        return super()._flops(groups) / self.sharing  # this site's share


class Publisher:
    """Writes the agreed state as policy versions, for the origin. The meeting calls this after every round."""

    def __init__(self, policy: Policy, shapes: Shapes, versions: Path, keep: int) -> None:
        self.policy, self.shapes, self.versions, self.keep = policy, shapes, versions, keep

    def __call__(self, round: int, agreed: Agreed) -> None:
        """Write version `round`, the state before that round, unless it exists."""
        final = self.versions / version_name(round)
        if final.exists():
            return
        self.shapes.scatter_(self.policy.masters, agreed.parameters)
        self.policy.round()
        self.policy.write(final)
        log.info("version %d is written to %s", round, final)
        drop_old_versions(self.versions, self.keep)


def shares(batch: Sequence[BatchGroup], sites: Sequence[str]) -> dict[tuple[str, int], str]:
    """Map each group of a batch to the site that trains it. All sites agree, because a full batch never changes."""
    return {(group.submission, group.group): sites[i % len(sites)] for i, group in enumerate(batch)}


def without_lost_sites(batch: Sequence[BatchGroup], fetched: Fetched, outcome: RoundOutcome) -> Fetched:
    """Drop the groups of sites that are not in the round's average."""
    owner = shares(batch, outcome.dealt)
    return replace(fetched, groups=[group for group in fetched.groups if owner[_id(group)] in outcome.kept])


def site_metrics(outcome: RoundOutcome) -> dict[str, float]:
    """Return the round's metrics: sites kept and lost, and each site's own figures (docs/pages.md)."""
    result = {"sites/kept": float(len(outcome.kept)), "sites/lost": float(len(set(outcome.dealt) - set(outcome.kept)))}
    for name in sorted({*outcome.kept, *outcome.left_out, *outcome.missing}):
        result[f"sites/{name}/kept"] = float(name in outcome.kept)
        result[f"sites/{name}/left_out"] = float(name in outcome.left_out)
    for name, figures in outcome.figures.items():
        reported = figures.model_dump(exclude_none=True)
        result |= {f"sites/{name}/{key}": float(value) for key, value in reported.items()}
    return result


def learner_terms(config: Config, policy: Policy) -> Terms:
    """Return the meeting's terms: each round deals the groups of one batch."""
    groups = config.coordinator.prompts_per_step
    return Terms(Shapes.of(policy.masters), rounds=config.run.steps, items=lambda _: groups, **config.sites.terms)


def _id(group: Group) -> tuple[str, int]:
    return group.submission, group.number


def about_of(settings: SitesSection, policy: Policy) -> dict[str, str]:
    """Return what all sites must have in common apart from the data: trained parameters and the outer optimizer."""
    shapes = {name: list(master.shape) for name, master in sorted(policy.masters.items())}
    result = {"trained parameters": sha256(json.dumps(shapes).encode()).hexdigest()}
    keys = ("kind", "lr", "momentum")
    return result | {f"sites.{key}": str(getattr(settings, key)) for key in keys}
