"""Supervised fine-tuning at one of several sites, which meet at `shoal meet`.

The updates of the plan are cut into rounds: `sites.sites` times `sites.inner_steps` of them each. The meeting says which
sites share a round; site i of n makes the round's updates i, i + n, ...: so none is made twice, and while a site is away the
others make more.
Invariant: at the end of a round the weights are equal at all sites, to the last bit. What a dead site had begun is lost; the
meeting counts it.
Called by `shoal sft --join`, on every rank of the site, and `shoal meet`. DiLoCo: arXiv 2311.08105. Left out: fragments,
delayed results.
"""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.config import Config, ConfigError
from shoal.diloco.about import about_model
from shoal.diloco.messages import Exchange, Roster, Terms, dealt_to
from shoal.learner.checkpoint import Progress
from shoal.learner.policy import Policy
from shoal.learner.sft.batch import Data
from shoal.learner.sft.trainer import Sft
from shoal.learner.site_policy import LATE, PolicySite, about_of, terms_of
from shoal.protocol.calling import StoppedError

SETTINGS = ("epochs", "batch", "batch_tokens", "lr", "warmup_steps", "grad_clip")  # of [sft], equal at all sites

log = logging.getLogger(__name__)


class SiteSft(Sft):
    def __init__(
        self,
        policy: Policy,
        data: Data,
        config: Config,
        folder: Path,
        about: dict[str, str],
        name: str,
        exchange: Exchange | None,
        roster: Roster | None,
    ) -> None:
        """`about`: of `sft_about`. `name`: of this site. `exchange` and `roster`: its leader's ways to the meeting."""
        super().__init__(policy, data, config, folder)
        terms = sft_terms(self.plan, config, policy)
        self.place = PolicySite(name, policy, terms, exchange, roster, give_up_s=config.sites.give_up_s)
        self.about = about

    def run(self, stop: threading.Event) -> Path | None:
        """Train to the last round, or until `stop`. Returns the model's folder, or None if stopped."""
        self.claim()
        round = self.checkpoints.restore().step
        try:
            round = self.place.enter(self.about, "it comes back" if round else "it joins")
            self.drop_after(round * self._updates)
            while round < self.place.terms.rounds:
                try:
                    loss = self.train_share(round, self.place.deal(stop), stop)
                    outcome = self.place.meet(loss, stop)
                except LATE as error:
                    log.warning("taking over what the sites agreed on: %s", error)
                    round = self.place.enter(self.about, str(error))
                    continue
                round += 1
                if self.ranks.leads:
                    log.info("round %d of %d: %s", round, self.place.terms.rounds, ", ".join(outcome.kept))
                self.evaluate(min(round * self._updates, len(self.plan)))
                self.checkpoints.begin(Progress(step=round))
        except StoppedError:
            return None
        finally:
            self.checkpoints.finish()
            self.place.leave()
        return self.publish()

    def train_share(self, round: int, sites: Sequence[str], stop: threading.Event) -> float | None:
        """This site's updates of a round. Returns the last one's loss. Raises StoppedError."""
        started_s, loss = time.monotonic(), None
        for number in shared(round, len(self.plan), self._updates, sites)[self.place.name]:
            if self.stops(stop):
                raise StoppedError(f"stopped before update {number + 1}")
            loss = self.train(number)
        self.place.computed_s += time.monotonic() - started_s
        return loss

    @property
    def _updates(self) -> int:
        return round_updates(self.config)


def shared(round: int, updates: int, of_round: int, sites: Sequence[str]) -> dict[str, list[int]]:
    """The numbers of the updates that each site makes in a round, of `updates` in all."""
    first, items = round * of_round, round_items(round, updates, of_round)
    return {name: [first + item for item in dealt_to(name, sites, items)] for name in sites}


def round_items(round: int, updates: int, of_round: int) -> int:
    """Updates of this round: the last one may have fewer."""
    return min(of_round, updates - round * of_round)


def round_updates(config: Config) -> int:
    """Updates of a round, over all sites."""
    return config.sites.sites * config.sites.inner_steps


def sft_terms(plan: Sequence[object], config: Config, policy: Policy) -> Terms:
    """Raises ConfigError for what only pretraining can."""
    if config.sites.fragments > 1 or config.sites.delay:
        raise ConfigError(
            "shoal sft meets at once and with all parameters: set sites.fragments = 1 and sites.delay = 0"
        )
    updates, of_round = len(plan), round_updates(config)
    return terms_of(config.sites, -(-updates // of_round), policy, lambda round: round_items(round, updates, of_round))


def sft_about(data: Data, config: Config, policy: Policy, model: Path) -> dict[str, str]:
    """What must be equal at all sites. `model`: its folder."""
    settings = {f"sft.{key}": str(getattr(config.sft, key)) for key in SETTINGS}
    run = {"run.seed": str(config.run.seed), "sites.inner_steps": str(config.sites.inner_steps)}
    return about_model(model) | settings | run | about_of(config.sites, policy) | {"data": data.digest()}
