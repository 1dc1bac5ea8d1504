"""What sites and the meeting tell each other, the terms they meet on, what must be equal at all sites, and the invite
that the meeting signs for each site.

Invariant: every field is bounded. Vectors travel beside these messages, as bytes of `codec`. Two sites whose `about` agree
compute the same thing from the same data. Nothing is believed that the meeting's key, which is in the invite, did not sign.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.diloco.agreed import Shapes
from shoal.diloco.codec import Kind
from shoal.protocol.identity import Identity, IdentityError, Signed
from shoal.protocol.invite import Invite
from shoal.protocol.pace import Refusal

PIECE_BYTES = 8 << 20  # of the state, in one answer
DIGEST = r"^[0-9a-f]{64}$"
Digest = Annotated[str, Field(pattern=DIGEST)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Words = Annotated[str, Field(max_length=400)]
Size = Annotated[int, Field(ge=0, le=1 << 60)]


@dataclass(frozen=True)
class Terms:
    """How the sites of one run meet; equal at all of them."""

    shapes: Shapes
    rounds: int  # of the whole run
    kind: Kind = "fp16"
    lr: float = 0.7
    momentum: float = 0.9
    wait_s: float = 60.0  # from a round's first offer until it closes without the others
    quorum: int = 1  # fewest offers that close a round
    sites: int = 1  # that the first round waits for
    outlier: float = 10.0  # norms above this many times the usual one are left out
    items: Callable[[int], int] | None = None  # of work that a round deals to its sites; None: each has as much

    def weight(self, round: int, name: str, dealt: Sequence[str]) -> int:
        """How much a site's pseudo-gradient counts: the items that it was dealt, by the meeting's own rule (`dealt_to`)."""
        return len(dealt_to(name, dealt, self.items(round))) if self.items and dealt else 1


def dealt_to(name: str, dealt: Sequence[str], items: int) -> range:
    """The numbers of the items of a round's work that a site has: of n sites, site i has i, i + n, ..."""
    return range(dealt.index(name), items, len(dealt))


class SiteMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Greeting(SiteMessage):
    """A site that comes or comes back."""

    about: dict[Annotated[str, Field(max_length=64)], Words] = Field(max_length=64)  # what must be equal at all sites
    placed: bool  # it knows where it was in the data


class Welcome(SiteMessage):
    accepted: int  # the last round to which this site's offer was accepted; −1: none


class Figures(SiteMessage):
    """What a site says of itself with an offer, for people: nothing is decided by it. Seconds and bytes since it started."""

    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None  # of its last inner step
    computed_s: Seconds = 0.0
    waited_s: Seconds = 0.0  # for data
    synced_s: Seconds = 0.0  # for other sites
    sent_bytes: Size = 0
    received_bytes: Size = 0


SILENT = Figures()


class RoundOutcome(SiteMessage):
    """How a round ended. The average lies beside it, as bytes; with nobody in `kept` there is none."""

    round: int
    kept: list[str]
    left_out: dict[str, str]  # site and reason
    missing: list[str]
    dealt: list[str] = []  # the sites that shared the round's work, if it was shared
    figures: dict[str, Figures] = {}  # of each site that offered
    digest: Digest  # of the agreed parameters afterwards


class RoundProgress(SiteMessage):
    outcome: RoundOutcome | None
    waiting_for: list[str]


class Share(SiteMessage):
    number: int


class Dealt(SiteMessage):
    sites: list[str]  # empty: not all are here yet


class Why(SiteMessage):
    why: Words


class StateDescriptor(SiteMessage):
    """A state file: the meeting signs this, as it signs every answer."""

    round: int
    sha256: Digest
    size_bytes: int


class MeetingError(Refusal):
    """The meeting refuses."""

    status = 403


class RoundClosedError(MeetingError):
    """The round is over, or this site holds other parameters than the others: fetch the state and go on from there."""

    status = 409


class ForgottenError(MeetingError):
    """The meeting was restarted and has no offer of this site for the open round: offer it again."""

    status = 404


class BadOfferError(MeetingError):
    status = 422


FILES = {
    "model": ("config.json",),
    "tokenizer": ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"),
}


def about_model(folder: Path) -> dict[str, str]:
    """Architecture and tokenizer of the model in this folder."""
    return {what: _digest([folder / name for name in names]) for what, names in FILES.items()}


def compare(name: str, about: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raise MeetingError, which names what differs, if a site trains something else than the run.

    Data come last: if the tokenizer differs, so may they.
    """
    for key in sorted({*ours, *about}, key=lambda key: (key == "data", key)):
        if ours.get(key) != about.get(key):
            raise MeetingError(
                f"{name} has another {key}: {_short(about.get(key))}, and the run has {_short(ours.get(key))}; "
                f"give every site the same {key}"
            )


def _digest(paths: list[Path]) -> str:
    result = sha256()
    for path in paths:
        if path.exists():
            result.update(path.name.encode() + sha256(path.read_bytes()).digest())
    return result.hexdigest()


def _short(text: str | None) -> str:
    return "none" if text is None else text[:60]


DOMAIN = "site-invite"


class SiteInvite(BaseModel):
    """What the meeting signed for one site."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: str
    name: str


class JoinRequest(SiteMessage):
    invite: Signed
    greeting: Greeting


def site_invite(identity: Identity, url: str, run: str, name: str) -> Invite:
    """The text that one site joins with."""
    payload = SiteInvite(run=run, name=name).model_dump_json()
    return Invite(url=url, key=identity.public, run=run, signed=Signed.make(identity, payload, domain=DOMAIN))


def name_of(invite: Invite) -> str:
    """The site that an invite is for. Raise MeetingError for an invite of another kind."""
    try:
        return SiteInvite.model_validate_json(invite.signed.open(invite.key, domain=DOMAIN)).name
    except (IdentityError, ValidationError) as error:
        raise MeetingError("this is not an invite for a site: `shoal pool meet` writes them to its folder") from error
