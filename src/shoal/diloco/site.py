"""One site's side of the outer steps: its copy of what is agreed, what it offers, and what it does with the outcome.

    site = Site(terms, agreed)
    digest, data = site.offer(tensors)            after the inner steps of a round
    outcome, data = meet(exchange, ...)           gives the offer, waits for the round's end
    site.apply(tensors, outcome, data)            the same outer step as everywhere; checks that the digest is the same

Invariant: after `apply` or `adopt` the copy of what is agreed is the meeting's, bit for bit, or an error says so.
"""

import time
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from shoal.diloco.agreed import Agreed, mix, pseudo_gradient
from shoal.diloco.codec import Encoded, ErrorFeedback
from shoal.diloco.messages import SILENT, Exchange, Figures, ForgottenError, RoundOutcome, Terms
from shoal.errors import ShoalError


class DifferentError(ShoalError):
    """This site's copy differs from what the others agree on."""


class SilenceError(ShoalError):
    """A round did not end in time; the message says who is missing."""

    restart_helps = True


class Site:
    def __init__(self, name: str, terms: Terms, agreed: Agreed, round: int = 0) -> None:
        self.name = name
        self.terms = terms
        self.agreed = agreed
        self.round = round
        self.offered: int | None = None  # the round of an offer whose outcome was not applied
        self.feedback = [ErrorFeedback(torch.zeros(size)) for size in terms.fragments.sizes]

    def offer(self, tensors: Mapping[str, Tensor]) -> tuple[str, bytes]:
        """The digest of the parameters this round started from, and the encoded way from them to `tensors`."""
        number = self.terms.fragment(self.round)
        agreed, local = self.agreed.parameters[number], self.terms.fragments.gather(tensors, number)

        def change(part: slice) -> Tensor:
            return pseudo_gradient(agreed[part], local[part])

        self.offered = self.round
        return self.agreed.digests[number], self.feedback[number].encode(change, self.terms.kind).to_bytes()

    def apply(self, tensors: Mapping[str, Tensor], outcome: RoundOutcome, data: bytes, keep: float = 0.0) -> None:
        """Make the round's outer step and go on from there. Raise DifferentError if the result is not the meeting's.

        `keep` is the share of this site's own parameters in what it goes on with.
        """
        number = self.terms.fragment(outcome.round)
        terms = self.terms
        if outcome.kept:
            average = Encoded.from_bytes(data, terms.kind, terms.fragments.sizes[number])
            self.agreed.step(number, average, lr=terms.lr, momentum=terms.momentum)
        if self.agreed.digests[number] != outcome.digest:
            raise DifferentError(f"fragment {number} differs from the others' after round {outcome.round}")
        agreed = self.agreed.parameters[number]
        mixed = mix(terms.fragments.gather(tensors, number), agreed, keep) if keep else agreed
        terms.fragments.scatter_(tensors, number, mixed)
        if self.name not in outcome.kept:
            self.forget([outcome.round])
        self.offered, self.round = None, outcome.round + 1

    def forget(self, rounds: Iterable[int]) -> None:
        """Drop what rounding left of offers for these rounds. What offers of other fragments left is still owed."""
        for number in {self.terms.fragment(round) for round in rounds}:
            self.feedback[number].left.zero_()

    def settle(self, tensors: Mapping[str, Tensor]) -> None:
        """Set all parameters to what is agreed: those too whose fragment had no part in the last round."""
        for number, values in enumerate(self.agreed.parameters):
            self.terms.fragments.scatter_(tensors, number, values)

    def adopt(self, tensors: Mapping[str, Tensor], round: int, data: bytes) -> None:
        """Take over the meeting's state as it is before `round`."""
        self.agreed = Agreed.from_bytes(data, self.terms.fragments)
        self.settle(tensors)
        if self.offered is not None:  # nobody told whether it counted
            self.forget([self.offered])
        self.offered, self.round = None, round


def meet(
    exchange: Exchange,
    round: int,
    digest: str,
    data: bytes,
    figures: Figures = SILENT,
    *,
    give_up_s: float,
    pause_s: float = 0.0,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[RoundOutcome, bytes]:
    """Give an offer and wait until its round is over; give it again to a meeting that was restarted.

    Raise ClosedError if the round is over already, SilenceError after `give_up_s` or when `stopped`.
    """
    deadline_s = time.monotonic() + give_up_s
    exchange.offer(round, digest, data, figures)
    while True:
        try:
            result = exchange.outcome(round)
        except ForgottenError:
            exchange.offer(round, digest, data, figures)
            continue
        if isinstance(result, tuple):
            return result
        if stopped():
            raise SilenceError(f"stopped while round {round} waited for {_named(result)}")
        if time.monotonic() > deadline_s:
            raise SilenceError(
                f"round {round} waited {give_up_s:.0f} s for {_named(result)}: start more sites, or lower sites.quorum"
            )
        time.sleep(pause_s)


def _named(sites: list[str]) -> str:
    return ", ".join(sites) or "more sites"
