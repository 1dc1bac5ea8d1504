"""The trainer's side of several sites: when a round is due, give the pseudo-gradient, and go on with what all agreed.

    depart   at the end of a round's inner steps: the offer leaves, in a thread of its own
    land     at once, or `sites.delay` inner steps later: the result is applied, or the site is healed

A site is healed, by taking over the meeting's state, when it is new, was late, or holds other bits. If it was left out, its
moments are dropped as well: what broke the parameters is in them too.
Invariant: after `land` the site's copy of what is agreed is the meeting's. No sequence is trained twice for an offer that
was accepted: the place in the data after each offer is on disk before the offer leaves.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.config import Config, ConfigError
from shoal.config.sites import SitesSection
from shoal.diloco.agreed import Agreed, Fragments
from shoal.diloco.messages import Figures, Greeting, MeetingLink, RoundClosedError, RoundOutcome, Terms
from shoal.diloco.site import DifferentError, Site, meet
from shoal.files import write_file

if TYPE_CHECKING:
    from shoal.learner.pretrain.trainer import Saved

log = logging.getLogger(__name__)

Flight = Future[tuple[RoundOutcome, bytes]]


class Outer:
    def __init__(
        self,
        name: str,
        settings: SitesSection,
        terms: Terms,
        link: MeetingLink,
        tensors: Mapping[str, Tensor],
        folder: Path,
        stopped: Callable[[], bool],
    ) -> None:
        self.settings, self.link, self.tensors = settings, link, tensors
        self.site = Site(name, terms, Agreed.of(tensors, terms.fragments))
        self.places = folder / "places.json"  # after the last offers, by round
        self.stopped = stopped
        self.flight: tuple[Flight, int] | None = None  # and the inner step that lands it
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="outer")
        self.waited_s, self.sent_bytes, self.received_bytes = 0.0, 0, 0
        self.loss: float | None = None  # of the last inner step; like the next, for people who watch the meeting
        self.computed_s = 0.0

    def begin(self, about: dict[str, str], saved: "Saved", *, resumed: bool) -> "Saved":
        """Join the meeting; `resumed`: there was a checkpoint. Return where to go on. Raise MeetingError."""
        if resumed:
            self._restore(saved)
        places: dict[str, Any] = json.loads(self.places.read_text()) if self.places.exists() else {}
        known = saved.place is not None or bool(places)
        digests = self.site.agreed.digests
        welcome = self.link.join(Greeting(about=about, round=self.site.round if known else None, digests=digests))
        if str(welcome.accepted) in places and welcome.accepted >= self.site.round:
            saved.place = places[str(welcome.accepted)]
        if not welcome.same:
            self.site.forget(range(self.site.round, welcome.accepted + 1))  # the checkpoint is older than these offers
            saved.step = self.heal("it comes back" if known else "it joins")
        return saved

    def due(self, step: int) -> bool:
        """Whether `after` may have to do something once `step` inner steps are done."""
        return step % self.settings.round_steps == 0 or (self.flight is not None and step == self.flight[1])

    def after(
        self, step: int, place: dict[str, int] | None, reset: Callable[[], None]
    ) -> tuple[int, RoundOutcome | None]:
        """Once `step` inner steps are done: depart and land if it is time. Return the step to go on from."""
        landed = None
        if self.flight and step == self.flight[1]:
            step, landed = self.land(step, reset)
        if step % self.settings.round_steps == 0 and step // self.settings.round_steps == self.site.round + 1:
            self.depart(step, place)
            last = self.site.round + 1 == self.site.terms.rounds
            if last or not self.settings.delay:
                step, landed = self.land(step, reset)
            if last:
                self.site.settle(self.tensors)
        return step, landed

    def depart(self, step: int, place: dict[str, int] | None) -> None:
        digest, data = self.site.offer(self.tensors)
        self._note(place)
        self.sent_bytes += len(data)
        future = self.thread.submit(
            meet,
            self.link,
            self.site.round,
            digest,
            data,
            Figures(loss=self.loss, computed_s=self.computed_s, synced_s=self.waited_s),
            give_up_s=self.settings.give_up_s,
            stopped=self.stopped,
        )
        self.flight = (future, step + self.settings.delay)

    def land(self, step: int, reset: Callable[[], None]) -> tuple[int, RoundOutcome | None]:
        """Apply the round's result. Return the step to go on from, and the outcome unless this site was too late."""
        assert self.flight is not None
        (future, _), self.flight = self.flight, None
        started_s = time.monotonic()
        try:
            outcome, data = future.result()
        except RoundClosedError as error:
            return self.heal(str(error)), None
        finally:
            self.waited_s += time.monotonic() - started_s
        self.received_bytes += len(data)
        try:
            self.site.apply(self.tensors, outcome, data, self.settings.keep)
        except DifferentError as error:
            return self.heal(str(error)), outcome
        if self.site.name in outcome.left_out:
            log.warning("left out of round %d: %s", outcome.round, outcome.left_out[self.site.name])
            reset()
        return step, outcome

    def heal(self, why: str) -> int:
        """Take over what is agreed. Return the inner step that belongs to it."""
        log.warning("taking over the state of the meeting: %s", why)
        round, data = self.link.state(why[:400])
        self.received_bytes += len(data)
        self.site.adopt(self.tensors, round, data)
        return round * self.settings.round_steps

    def end(self) -> None:
        self.link.leave()
        self.thread.shutdown(wait=False, cancel_futures=True)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this site."""
        left = {f"rounding.{number}": each.left for number, each in enumerate(self.site.feedback)}
        return self.site.agreed.tensors() | left

    def _restore(self, saved: "Saved") -> None:
        self.site.agreed = Agreed.take(saved.tensors, self.site.terms.fragments)
        self.site.round = saved.round
        for number, feedback in enumerate(self.site.feedback):
            feedback.left = saved.tensors[f"rounding.{number}"]

    def _note(self, place: dict[str, int] | None) -> None:
        held: dict[str, Any] = json.loads(self.places.read_text()) if self.places.exists() else {}
        kept = {round: where for round, where in held.items() if int(round) >= self.site.round - 1}
        write_file(self.places, json.dumps(kept | {str(self.site.round): place}).encode())


def terms_of(config: Config, tensors: Mapping[str, Tensor]) -> Terms:
    """How the sites of this run meet. Raise ConfigError if the steps are no whole number of rounds."""
    settings, steps = config.sites, config.pretrain.steps
    if steps % settings.inner_steps:
        raise ConfigError(
            f"pretrain.steps = {steps} is not a multiple of sites.inner_steps = {settings.inner_steps}: "
            "the last steps would reach no other site"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Terms(Fragments(shapes, settings.fragments), rounds=steps // settings.round_steps, **settings.terms)


def named(model: torch.nn.Module) -> dict[str, Tensor]:
    """The model's own parameters by name: the live tensors, each once."""
    return {name: parameter.data for name, parameter in model.named_parameters()}
