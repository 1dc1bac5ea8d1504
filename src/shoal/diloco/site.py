"""One site's side of the outer steps: it keeps a copy of the agreed state, sends offers, and applies the outcomes.

    Site           the state: `offer` after the inner steps, `apply` the outcome, or `adopt` the meeting's state
    Participant    a site connected to the meeting: `enter` it, then `exchange` once per round

A site adopts the meeting's state when it joins, when its offer is late, or when its copy differs.
Invariant: after `apply` or `adopt` the site's copy equals the meeting's agreed state bit for bit, or an error is raised.
"""

import logging
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shoal.diloco.agreed import Agreed, pseudo_gradient
from shoal.diloco.codec import Encoded, ErrorFeedback
from shoal.diloco.messages import Figures, ForgottenError, Greeting, RoundClosedError, RoundOutcome, Terms
from shoal.diloco.remote import Remote
from shoal.errors import ShoalError
from shoal.protocol.calling import StoppedError

log = logging.getLogger(__name__)


class SilenceError(ShoalError):
    """A round did not end in time. The message names the missing sites."""

    restart_helps = True


class Site:
    def __init__(self, name: str, terms: Terms, agreed: Agreed, round: int = 0) -> None:
        self.name, self.terms, self.agreed, self.round = name, terms, agreed, round
        self.offered = False  # whether there is an offer whose outcome is not applied yet
        self.feedback = ErrorFeedback(torch.zeros(terms.shapes.size))

    def offer(self, tensors: Mapping[str, Tensor]) -> tuple[str, bytes]:
        """Return the digest of the parameters this round started from, and the encoded pseudo-gradient of `tensors`."""
        agreed, local = self.agreed.parameters, self.terms.shapes.gather(tensors)
        self.offered = True
        encoded = self.feedback.encode(lambda part: pseudo_gradient(agreed[part], local[part]), self.terms.kind)
        return self.agreed.digest, encoded.to_bytes()

    def apply(self, tensors: Mapping[str, Tensor], outcome: RoundOutcome, data: bytes) -> None:
        """Make the round's outer step and set `tensors` to the result. Raise RoundClosedError if the digests differ."""
        terms = self.terms
        if outcome.kept:
            average = Encoded.from_bytes(data, terms.kind, terms.shapes.size)
            self.agreed.step(average, lr=terms.lr, momentum=terms.momentum)
        if self.agreed.digest != outcome.digest:
            raise RoundClosedError(f"this site differs from the others after round {outcome.round}")
        terms.shapes.scatter_(tensors, self.agreed.parameters)
        if self.name not in outcome.kept:
            self.forget()
        self.offered, self.round = False, outcome.round + 1

    def forget(self) -> None:
        """Drop the rounding error of an offer that was not counted."""
        self.feedback.left.zero_()

    def adopt(self, tensors: Mapping[str, Tensor], round: int, data: bytes) -> None:
        """Adopt the meeting's state before `round`."""
        self.agreed = Agreed.from_bytes(data, self.terms.shapes)
        self.terms.shapes.scatter_(tensors, self.agreed.parameters)
        if self.offered:  # the meeting may or may not have counted the offer
            self.forget()
        self.offered, self.round = False, round


GIVE_UP_S = 900.0  # how long a site waits for a round, or for an unreachable meeting


class Participant:
    def __init__(self, name: str, terms: Terms, link: Remote, tensors: Mapping[str, Tensor]) -> None:
        self.link, self.spent = link, Figures()
        self.site = Site(name, terms, Agreed.of(tensors, terms.shapes))

    def enter(
        self, tensors: Mapping[str, Tensor], about: dict[str, str], why: str, *, placed: bool = True
    ) -> tuple[int, int]:
        """Join or rejoin, and set `tensors` to the agreed state. `placed`: this site knows its place in the data.

        Return the open round, and the last round that took this site's offer (-1: none). Raise MeetingError.
        """
        accepted = self.link.join(Greeting(about=about, placed=placed)).accepted
        round, data = self.link.state(why[:400])
        self.spent.received_bytes += len(data)
        self.site.adopt(tensors, round, data)
        return round, accepted

    def exchange(self, tensors: Mapping[str, Tensor], stopped: Callable[[], bool] = lambda: False) -> RoundOutcome:
        """Offer this round's result, wait for the outcome, and set `tensors` to the new agreed state.

        Raise RoundClosedError if this site has to `enter` again, SilenceError after GIVE_UP_S, StoppedError.
        """
        digest, data = self.site.offer(tensors)
        self.spent.sent_bytes += len(data)
        started_s = time.monotonic()
        try:
            outcome, average = meet(self.link, self.site.round, digest, data, self.spent, GIVE_UP_S, stopped)
        finally:
            self.spent.synced_s += time.monotonic() - started_s
        self.spent.received_bytes += len(average)
        self.site.apply(tensors, outcome, average)
        if why := outcome.left_out.get(self.site.name):
            log.warning("this site is left out of round %d: %s; its optimizer moments are dropped", outcome.round, why)
        return outcome


def meet(
    link: Remote,
    round: int,
    digest: str,
    data: bytes,
    figures: Figures,
    give_up_s: float,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[RoundOutcome, bytes]:
    """Send an offer and wait until its round is over. Send it again if the meeting was restarted.

    Raise RoundClosedError if the round is over already, SilenceError after `give_up_s`, StoppedError when `stopped`.
    """
    deadline_s = time.monotonic() + give_up_s
    link.offer(round, digest, data, figures)
    while True:
        try:
            result = link.outcome(round)
        except ForgottenError:
            link.offer(round, digest, data, figures)
            continue
        if isinstance(result, tuple):
            return result
        missing = ", ".join(result) or "more sites"
        if stopped():
            raise StoppedError(f"stopped while round {round} waited for {missing}")
        if time.monotonic() > deadline_s:
            raise SilenceError(
                f"round {round} waited {give_up_s:.0f} s for {missing}: start more sites, or lower sites.quorum"
            )
