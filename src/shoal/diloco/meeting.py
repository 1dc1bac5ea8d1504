"""The meeting of all sites: its members, the open round, and the agreed state. The caller provides network and clock.

A round is open until every expected site has sent an offer. With a quorum of offers, it also closes once `wait_s` have
passed since the first offer. Then the offers that are not outliers (`refused`) are averaged, and the average is rounded
once. Its bytes are the round's result: every site and the meeting decode the same bytes and make the same step. Later
rounds do not wait for a missing site until it comes back.
If the sites share a round's work, the first site that asks deals it to all that are present. If these fall silent, sites
that came later get the whole work in a second deal. Only the deal of the round's first offer counts.

Invariant: after a kill at any moment, all answers given before remain true. A round's files are written before
`meeting.json` names the next round. A restarted meeting continues with the round that `meeting.json` names. Only the
open round's offers are lost, and sites send them again. So at most one outer step is lost, and never a part of one.
Not thread-safe. Left out: lying sites (a majority can move the median of norms; a single site can send a wrong
direction of modest length), and distributing the work of averaging.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from shoal.diloco.agreed import Agreed, StateError
from shoal.diloco.archive import KEPT, Archive
from shoal.diloco.codec import CodecError, Encoded, ErrorFeedback
from shoal.diloco.messages import (
    BadOfferError,
    Figures,
    ForgottenError,
    Greeting,
    MeetingError,
    RoundClosedError,
    RoundOutcome,
    StateDescriptor,
    Terms,
    Welcome,
    compare,
)
from shoal.errors import printable

PAST = 16  # recent rounds whose norms are compared
LONGEST_PAUSE = 64  # maximum number of rounds between two rounds that wait for a failing site
STEADY = 8  # rounds without a failure after which a site's failures are forgotten
AHEAD = 4  # a site may take this many times as many shares per offer as the others
SPARE_SHARES = 16  # and these, because the others may be slower, and a restarted site loses a share

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SiteOffer:
    change: Encoded
    size_bytes: int
    norm: float
    figures: Figures


class Meeting:
    def __init__(
        self,
        folder: Path,
        terms: Terms,
        about: dict[str, str],
        run: str,
        first: Callable[[], Agreed],
        clock: Callable[[], float] = time.monotonic,
        publish: Callable[[int, Agreed], None] = lambda round, agreed: None,
    ) -> None:
        """Open the meeting in `folder`, or create it with the state that `first` returns.

        Raise MeetingError if the folder belongs to another run. `publish` is called at the start and after each round,
        with the open round and the agreed state before it.
        """
        self.folder, self.terms, self.about, self.run, self.clock = folder, terms, dict(about), run, clock
        self.round, self.publish, self.archive, self.members = 0, publish, Archive(folder), SiteMembers()
        self.norms: list[dict[str, float]] = []  # by round (the last PAST), then by site
        self.outcomes: dict[int, RoundOutcome] = {}
        self.offers: dict[str, SiteOffer] = {}
        self.deals: list[list[str]] = []  # the open round's deals, each the sites that share its work; a site is in one
        self.dealt: list[str] = []  # the deal that counts, from the first offer on
        self.healed: dict[str, str] = {}
        self.first_offer_s: float | None = None
        self.asked_s: float | None = None  # when a site without a share first asked for one
        self.opened_s = clock()
        self.lasted_s = 0.0  # how long the last round was open
        if saved := self.archive.load():
            self._reopen(saved)
        else:
            self.agreed = first()
            self.feedback = ErrorFeedback(torch.zeros(terms.shapes.size))
            self.archive.write_state(0, self.agreed, self.feedback)
            self._save()
        self.publish(self.round, self.agreed)

    @property
    def over(self) -> bool:
        return self.round >= self.terms.rounds

    # --- sites -----------------------------------------------------------------------------------------------------

    def join(self, name: str, greeting: Greeting) -> Welcome:
        """Add a site. Raise MeetingError if its model, tokenizer, data or recipe differs."""
        expected = {key: greeting.about[key] for key in ("data",) if key in greeting.about} | self.about
        compare(name, greeting.about, expected, first=next(iter(self.members.named), ""))
        self.about = expected  # the meeting reads no data, so the first site defines which data the run uses
        member = self.members.join(name, greeting, self.round)
        self._save()
        return Welcome(accepted=member.accepted)

    def take(self, name: str) -> int:
        """Give the site the next share of the data."""
        share = self.members.take(name)
        self._save()
        return share

    def deal(self, name: str, round: int) -> list[str]:
        """Return the sites that share the open round's work, in the same order for all; [] while sites are missing.

        A site that joins after the deal has no share. If it waits `wait_s` longer than the last round took, and there is
        no offer, it shares a second deal with the other sites that have no share. Raise RoundClosedError if the round is
        over.
        """
        self.members[name]  # raises MeetingError if the site has not joined
        if self.terms.items is None:
            raise MeetingError("the sites of this run do not share the work of a round")
        if round != self.round or self.over:
            raise RoundClosedError(f"round {round} is over; round {self.round} is open")
        if not self._share(name) and not self.dealt:
            self._deal_anew(round)
        return self._share(name) or self.dealt or (self.deals[-1] if self.deals else [])

    def _share(self, name: str) -> list[str]:
        """Return the deal that gives the site a share of the open round; [] if none does."""
        return next((sites for sites in ([self.dealt] if self.dealt else self.deals) if name in sites), [])

    def _deal_anew(self, round: int) -> None:
        """Deal the work to the sites that have no share, if all that have one seem to be gone."""
        if self.asked_s is None:
            self.asked_s = self.clock()
        patience_s = self.terms.wait_s + (self.lasted_s if self.deals else 0.0)
        if (not self.deals and self._gathered()) or self.clock() - self.asked_s >= patience_s:
            sites = self.members.sharing(
                round, self.terms.quorum, without={name for each in self.deals for name in each}
            )
            if sites:
                self.deals, self.asked_s = [*self.deals, sites], None
                self._save()

    def leave(self, name: str) -> None:
        self.members[name].expected = False
        log.info("%s leaves in round %d", name, self.round)
        self._save()

    def heal(self, name: str, why: str) -> None:
        """Note once per round that a site adopts the state, and why. The next round waits for the site."""
        self.members.expect(name, self.round)
        if name not in self.healed:
            self.healed[name] = printable(why, keep="")
            log.warning("%s is healed in round %d: %s", name, self.round, self.healed[name])
        self._save()

    # --- rounds ----------------------------------------------------------------------------------------------------

    def offer(self, name: str, round: int, digest: str, data: bytes, figures: Figures) -> None:
        member = self.members[name]
        ended = self.outcomes.get(round)
        if ended is not None and name in {*ended.kept, *ended.left_out}:
            return  # it was counted; only the answer was lost
        if round != self.round or self.over:
            raise RoundClosedError(f"round {round} is over; round {self.round} is open")
        if digest != self.agreed.digest:
            raise RoundClosedError(f"the parameters of {name} differ from the others' before round {round}")
        if self.terms.items and not self._share(name):
            raise RoundClosedError(f"{name} has no share of the work of round {round}")
        if name in self.offers:
            return  # keep the first offer, because decoding another would delay the other sites
        try:
            change = Encoded.from_bytes(data, self.terms.kind, self.terms.shapes.size)
        except CodecError as error:
            raise BadOfferError(f"the offer of {name} for round {round} is malformed: {error}") from error
        self.dealt = self._share(name)
        self.offers[name] = SiteOffer(change, len(data), change.norm(), figures)
        log.info("%s offers for round %d", name, round)
        member.expected = True
        if self.first_offer_s is None:
            self.first_offer_s = self.clock()

    def outcome(self, name: str, round: int) -> RoundOutcome | None:
        """Return the round's outcome; None while the round is open."""
        if round == self.round and not self.over:
            if name not in self.offers:
                raise ForgottenError(f"{name} has no offer in round {round}: offer it again")
            return None
        if round not in self.outcomes:
            raise RoundClosedError(f"the outcome of round {round} is not kept; round {self.round} is open")
        return self.outcomes[round]

    def average(self, round: int) -> bytes:
        if round not in self.outcomes:
            raise RoundClosedError(f"the average of round {round} is not kept; round {self.round} is open")
        try:
            return self.archive.average(round)
        except StateError as error:  # does not end the meeting, because the agreed state has its own file
            raise RoundClosedError(f"the average of round {round} is lost: {error}") from error

    def state(self) -> tuple[StateDescriptor, Path]:
        """Return the agreed state before the open round: its descriptor and file."""
        return self.archive.describe(self.round), self.archive.path("state", self.round)

    def waiting_for(self) -> list[str]:
        present = self.members.expected()
        expected = {name for name, each in present.items() if each.since <= self.round}
        return sorted((present.keys() & self.dealt if self.dealt else expected) - self.offers.keys())

    def due(self) -> bool:
        """Return whether the open round can close now."""
        if self.over or len(self.offers) < self.terms.quorum or self.first_offer_s is None:
            return False
        waited_s = self.clock() - self.first_offer_s
        return (self._gathered() and not self.waiting_for()) or waited_s >= self.terms.wait_s

    def close(self) -> RoundOutcome:
        """Average the offers, make the outer step, and open the next round."""
        terms, missing = self.terms, self.waiting_for()
        norms, own = self._norms(), 0.0
        if not any(self.norms):  # without past norms, compare with the norm of the parameters
            own = float(torch.linalg.vector_norm(self.agreed.parameters, dtype=torch.float64))
        left_out = refused(norms, self.norms, terms.outlier, own)
        kept = sorted(set(self.offers) - set(left_out))
        data = b""
        if kept:
            average = self._average(kept)
            self.agreed.step(average, lr=terms.lr, momentum=terms.momentum)
            data = average.to_bytes()
        outcome = RoundOutcome(
            round=self.round,
            kept=kept,
            left_out=left_out,
            missing=missing,
            dealt=self.dealt,
            figures={name: each.figures for name, each in sorted(self.offers.items())},
            digest=self.agreed.digest,
        )
        self.members.lost_shares += len(set(self.dealt) - set(kept))
        self.archive.record(self._record_line(outcome, data))
        self.archive.write_average(self.round, data)
        self.archive.write_state(self.round + 1, self.agreed, self.feedback)
        self._advance(outcome)
        self._save()
        self.archive.drop_old()
        self.publish(self.round, self.agreed)
        return outcome

    def _norms(self) -> dict[str, float]:
        """Return the norm of each offer: 0 for a site without work, whose offer has no weight, if it is finite."""
        weights = {name: self.terms.weight(self.round, name, self.dealt) for name in self.offers}
        return {name: each.norm * min(1, weights[name]) for name, each in self.offers.items()}

    def _gathered(self) -> bool:
        return bool(self.round or self.deals) or len(self.members.named) >= self.terms.sites

    def _average(self, kept: list[str]) -> Encoded:
        weights = [self.terms.weight(self.round, name, self.dealt) for name in kept]
        divisor = math.gcd(*weights) or 1  # makes equal weights 1, so that multiplying by them changes no bit
        weighted = [(weight // divisor, self.offers[name].change) for weight, name in zip(weights, kept, strict=True)]
        total_weight = sum(weights) // divisor or 1

        def mean(part: slice) -> Tensor:
            total = torch.zeros(part.stop - part.start, dtype=torch.float64)
            for weight, change in weighted:  # in the order of names, so that the bits do not depend on arrival order
                total += weight * change.get(part).double()
            return total / total_weight

        return self.feedback.encode(mean, self.terms.kind)

    def _advance(self, outcome: RoundOutcome) -> None:
        for name, why in outcome.left_out.items():
            log.warning("%s is left out of round %d: %s", name, outcome.round, why)
        for name in outcome.missing:
            log.warning(
                "%s is missing in round %d: later rounds do not wait for it until it is back", name, outcome.round
            )
            self.members[name].expected = False
        for name in {*outcome.missing, *outcome.dealt} - self.offers.keys():
            self.members.fail(name, outcome.round)
        for name in self.offers:
            member = self.members[name]
            member.offers += 1
            member.accepted = outcome.round
            if outcome.round >= member.since + STEADY:
                member.failed = 0
        norms = {name: norm for name, norm in self._norms().items() if norm and name in outcome.kept}
        self.norms = [*self.norms, norms][-PAST:]
        self.outcomes = {round: each for round, each in self.outcomes.items() if round > outcome.round - KEPT}
        self.outcomes[outcome.round] = outcome
        self.offers, self.healed, self.deals, self.dealt, self.first_offer_s, self.asked_s = {}, {}, [], [], None, None
        self.lasted_s = self.clock() - self.opened_s
        self.round, self.opened_s = self.round + 1, self.clock()

    def _record_line(self, outcome: RoundOutcome, data: bytes) -> dict[str, Any]:
        """Return the round's line in rounds.jsonl."""
        return {
            **outcome.model_dump(),
            "norms": {name: each.norm for name, each in sorted(self.offers.items())},
            "bytes_in": {name: each.size_bytes for name, each in sorted(self.offers.items())},
            "bytes_out_each": len(data),
            "figures": {name: each.figures.model_dump() for name, each in sorted(self.offers.items())},
            "healed": self.healed,
            "open_s": round(self.clock() - self.opened_s, 3),
            "gathering_s": round(self.clock() - (self.first_offer_s or self.opened_s), 3),
            "unfinished_shares": self.members.unfinished(),
        }

    def _save(self) -> None:
        fields: dict[str, Any] = {
            "run": self.run,
            "about": self.about,
            "round": self.round,
            "deals": self.deals,
            "lasted_s": self.lasted_s,
            "kept_norms": self.norms,
            "outcomes": [outcome.model_dump() for outcome in self.outcomes.values()],
        }
        self.archive.save(fields | self.members.to_json())

    def _reopen(self, saved: dict[str, Any]) -> None:
        self.about = {key: text for key, text in saved["about"].items() if key == "data"} | self.about
        compare(f"the meeting in {self.folder}", saved["about"], self.about)
        self.round, self.norms = saved["round"], saved.get("kept_norms", [])
        self.deals, self.lasted_s = saved.get("deals", []), saved.get("lasted_s", 0.0)
        self.members.restore(saved)
        self.outcomes = {each["round"]: RoundOutcome.model_validate(each) for each in saved["outcomes"]}
        self.agreed, self.feedback = self.archive.state(self.round, self.terms.shapes)
        self.archive.drop_records(self.round)
        log.info("the meeting resumes in round %d", self.round)


# --- members -----------------------------------------------------------------------------------------------------------


@dataclass
class SiteMember:
    expected: bool = False  # whether rounds wait for it
    since: int = 0  # the first round that waits for it
    failed: int = 0  # rounds that waited for it in vain, since it was last steady
    share: int | None = None  # the number of its share of the data
    taken: int = 0  # number of shares that it has taken
    offers: int = 0  # number of its offers in closed rounds
    accepted: int = -1  # the last round that took its offer


class SiteMembers:
    """The sites, and the share of the data that each site reads.

    Rounds wait ever more rarely for a site that fails: after n rounds that waited for it in vain, the next round that
    waits is the 2^(n−1)-th after them. An offer in time resets n if the last STEADY rounds did not wait in vain. If fewer
    were enough, a site that offers in every second round could delay all others.
    Invariant: a share is given to one site only, unless a site takes far more shares than the others. If a site loses its
    place in the data, the rest of its share is lost.
    """

    def __init__(self) -> None:
        self.named: dict[str, SiteMember] = {}  # all sites that ever joined
        self.next_share, self.lost_shares = 0, 0

    def __getitem__(self, name: str) -> SiteMember:
        """Raise MeetingError for a site that never joined."""
        if name not in self.named:
            raise MeetingError(f"{name} has not joined this meeting")
        return self.named[name]

    def join(self, name: str, greeting: Greeting, round: int) -> SiteMember:
        """Add or readmit a site while `round` is open. Later rounds wait for it."""
        member = self.named.setdefault(name, SiteMember())
        self.expect(name, round)
        if not greeting.placed and member.share is not None:
            log.warning("%s lost its place in the data: the rest of share %d is lost", name, member.share)
            self.lost_shares, member.share = self.lost_shares + 1, None
        return member

    def expect(self, name: str, round: int) -> None:
        """Wait for this site from the round after `round` on, or later if it failed recently."""
        member = self[name]
        if not member.expected:
            log.info("%s is present from round %d on", name, round)
            member.expected, member.since = True, max(member.since, round + (round > 0))

    def fail(self, name: str, round: int) -> None:
        """Count a round that waited for this site in vain."""
        member = self[name]
        member.failed += 1
        member.since = max(member.since, round + min(2 ** min(member.failed - 1, 32), LONGEST_PAUSE))

    def sharing(self, round: int, quorum: int, without: Collection[str] = ()) -> list[str]:
        """Return the sites that can share a round's work, sorted; empty if there are too few.

        Sites that failed recently are left out if the others suffice.
        """
        here = {name: each for name, each in self.expected().items() if name not in without}
        steady = sorted(name for name, each in here.items() if each.failed < 2 or each.since <= round)
        result = steady if len(steady) >= quorum else sorted(here)
        return result if len(result) >= quorum else []

    def take(self, name: str) -> int:
        """Give the site the next share of the data.

        A site far ahead of the others does not move them forward: other sites get the same shares later. The number of
        shares per offer is about equal at honest sites, because all train on equally many tokens per round.
        """
        member = self[name]
        others = [each for other, each in self.named.items() if other != name and (each.expected or each.offers)]
        rates = [each.taken / (each.offers + 1) for each in others if each.taken]
        if rates and member.taken >= SPARE_SHARES + AHEAD * (member.offers + 1) * max(rates):
            member.share = max(self.next_share, -1 if member.share is None else member.share + 1)
        else:
            member.share, self.next_share, member.taken = self.next_share, self.next_share + 1, member.taken + 1
        return member.share

    def expected(self) -> dict[str, SiteMember]:
        return {name: each for name, each in self.named.items() if each.expected}

    def unfinished(self) -> int:
        """Count lost shares: their site is away, lost its place in the data, or missed a round whose work it shared."""
        return self.lost_shares + sum(not each.expected and each.share is not None for each in self.named.values())

    def to_json(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        members = {name: asdict(member) for name, member in self.named.items()}
        return {"next_share": self.next_share, "lost_shares": self.lost_shares, "members": members}

    def restore(self, saved: dict[str, Any]) -> None:
        self.next_share, self.lost_shares = saved["next_share"], saved["lost_shares"]
        self.named = {name: SiteMember(**member) for name, member in saved["members"].items()}


# --- outliers ----------------------------------------------------------------------------------------------------------

MIN_NORMS = 3  # offers needed to use the median of one round, because with fewer, one site could determine the median


def refused(
    norms: Mapping[str, float], past: Sequence[Mapping[str, float]], factor: float, parameters: float
) -> dict[str, str]:
    """Return the sites to leave out, each with the reason. `past`: norms of recently averaged offers, by round and site.

    A site is compared with the median of the other sites' medians, so that it cannot raise its own limit. If the others
    have no past, it is compared with its own median, else with the others' norms in this round, else with the norm of
    the parameters when the round opened (`parameters`). Norms of 0 are not used.
    """
    why = {name: "not finite" for name, norm in norms.items() if not math.isfinite(norm)}
    finite = {name: norm for name, norm in norms.items() if name not in why}
    known: dict[str, list[float]] = {}
    for each in past:
        for name, norm in each.items():
            known.setdefault(name, []).append(norm)
    together = median(finite.values()) if len(finite) >= MIN_NORMS else 0.0
    for name, norm in finite.items():
        others = [median(each) for other, each in known.items() if other != name]
        beside = [each for other, each in finite.items() if other != name and each]
        usual = max(median(others or known.get(name) or beside or [parameters]), together)
        if usual and norm > factor * usual:
            why[name] = f"its norm {norm:.3g} is more than {factor:g} times the usual {usual:.3g}"
    return why
