"""A policy that is trained at one of several sites: it gives the sites' meeting what it learned, and takes what all agreed.

Under torchrun a site has several ranks (`ranks`). Its leader alone talks to the meeting and holds what is agreed: masters
are gathered for it in float32, and what it makes of them is spread again.
Invariant: all ranks of a site make the same calls, and each learns whether the leader's call was LATE, failed or went well.
Called by `sites`. DiLoCo: arXiv 2311.08105. Left out: delayed results, fragments.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from shoal.config.sites import SitesSection
from shoal.diloco.agreed import Agreed, Fragments
from shoal.diloco.messages import ClosedError, Exchange, Figures, Greeting, Outcome, Roster, Terms
from shoal.diloco.site import DifferentError, SilenceError, Site, meet
from shoal.errors import ShoalError
from shoal.learner.policy import Policy
from shoal.protocol.calling import StoppedError

POLL_S = 0.2
LATE = (ClosedError, DifferentError)  # this site has to take over what the others agreed on

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Way:
    """A site's ways to the meeting, and its copy of what is agreed: the leader's alone."""

    exchange: Exchange
    roster: Roster
    site: Site


class PolicySite:
    """A policy that is trained at one of several sites. Every rank of the site calls the same methods."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        terms: Terms,
        exchange: Exchange | None,
        roster: Roster | None,
        *,
        give_up_s: float,
    ) -> None:
        """`exchange` and `roster`: None on ranks that do not lead."""
        self.name, self.policy, self.terms, self.give_up_s = name, policy, terms, give_up_s
        self.ranks = policy.ranks
        masters = self._gathered()
        self.way: Way | None = None
        if exchange is not None and roster is not None:
            self.way = Way(exchange, roster, Site(name, terms, Agreed.of(masters, terms.fragments)))
        self.computed_s = self.waited_s = self.synced_s = 0.0
        self.sent_bytes = self.received_bytes = 0

    def enter(self, about: dict[str, str], why: str) -> int:
        """Join, or join again, and take over what is agreed. Returns the open round. Raises MeetingError."""
        self.policy.before_update()  # a checkpoint that is being written holds the masters
        masters = self._gathered()

        def adopt(way: Way) -> int:
            greeting = Greeting(about=about, round=way.site.round, digests=way.site.agreed.digests)
            way.roster.join(greeting)
            round, data = way.exchange.state(why[:400])
            self.received_bytes += len(data)
            way.site.adopt(masters, round, data)
            return round

        round: int = self.agree(adopt)
        self._spread(masters)
        return round

    def deal(self, stop: threading.Event) -> list[str]:
        """The sites that share the open round, this one among them. Raises ClosedError if it came too late."""
        started_s = time.monotonic()

        def ask(way: Way) -> list[str]:
            while not stop.is_set():
                dealt = way.roster.deal(way.site.round)
                if self.name in dealt:
                    return dealt
                stop.wait(POLL_S)  # not all are here yet; or the round was dealt before this site came, and will end
            raise StoppedError(f"stopped before round {way.site.round} was dealt")

        try:
            dealt: list[str] = self.agree(ask)
        finally:
            self.synced_s += time.monotonic() - started_s
        return dealt

    def meet(self, loss: float | None, stop: threading.Event) -> Outcome:
        """Give what was learned and take what all agreed. Raises ClosedError, DifferentError: `enter` again."""
        self.policy.before_update()
        masters = self._gathered()

        def exchange(way: Way) -> Any:
            outcome, average = self._exchange(way, masters, loss, stop)
            way.site.apply(masters, outcome, average)
            return outcome.model_dump(mode="json")

        outcome = Outcome.model_validate(self.agree(exchange))
        self._spread(masters)
        if why := outcome.left_out.get(self.name):
            log.warning("left out of round %d: %s; its moments are dropped", outcome.round, why)
            self.policy.optimizer.state.clear()
        return outcome

    def leave(self) -> None:
        if self.way is not None:
            self.way.roster.leave()

    def agree(self, ask: Callable[[Way], Any]) -> Any:
        """What the leader's `ask` returns, JSON, on every rank. If it raises LATE, so do all; else the others stop."""
        if self.way is None:
            told = json.loads(self.ranks.broadcast(None))
            if "late" in told:
                raise ClosedError(told["late"])
            if "failed" in told:
                raise StoppedError(told["failed"])
            return told["found"]
        try:
            found = ask(self.way)
        except ShoalError as error:
            self.ranks.broadcast(json.dumps({"late" if isinstance(error, LATE) else "failed": str(error)}).encode())
            raise
        self.ranks.broadcast(json.dumps({"found": found}).encode())
        return found

    def _gathered(self) -> dict[str, Tensor]:
        """The masters: live where there is one rank; else whole copies on the leader's CPU, none on other ranks."""
        if self.ranks.size == 1:
            return self.policy.masters
        found = {name: self.ranks.gathered(master, torch.float32) for name, master in self.policy.masters.items()}
        return {name: whole for name, whole in found.items() if whole is not None}

    def _spread(self, masters: Mapping[str, Tensor]) -> None:
        """Set the policy to what the leader made of `_gathered`."""
        if self.ranks.size > 1:
            for name, master in self.policy.masters.items():
                self.ranks.spread_(master, masters.get(name))
        self.policy.round()

    def _exchange(
        self, way: Way, masters: Mapping[str, Tensor], loss: float | None, stop: threading.Event
    ) -> tuple[Outcome, bytes]:
        digest, data = way.site.offer(masters)
        self.sent_bytes += len(data)
        figures = Figures(
            loss=loss,
            computed_s=self.computed_s,
            waited_s=self.waited_s,
            synced_s=self.synced_s,
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
        )
        started_s = time.monotonic()
        try:
            outcome, average = meet(
                way.exchange,
                way.site.round,
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
        self.received_bytes += len(average)
        return outcome, average


def terms_of(settings: SitesSection, rounds: int, policy: Policy, items: Callable[[int], int]) -> Terms:
    """`items`: of work that each round deals to its sites."""
    shapes = {name: tuple(master.shape) for name, master in policy.masters.items()}
    return Terms(Fragments(shapes), rounds=rounds, items=items, **settings.terms)


def about_of(settings: SitesSection, policy: Policy) -> dict[str, str]:
    """What must be equal at all sites beside the data: which parameters travel, and how."""
    shapes = {name: list(master.shape) for name, master in sorted(policy.masters.items())}
    found = {"trained parameters": sha256(json.dumps(shapes).encode()).hexdigest()}
    keys = ("kind", "lr", "momentum")
    return found | {f"sites.{key}": str(getattr(settings, key)) for key in keys}
