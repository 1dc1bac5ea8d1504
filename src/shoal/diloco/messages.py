"""Messages between sites and the meeting: the terms, the facts that must be equal at all sites, and the site invites.

Invariant: every field is bounded. Vectors are transferred separately, encoded by `codec`. Two sites with equal `about`
compute the same thing from the same data. Sites accept only signed answers of the meeting, whose key is in the invite.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError

from shoal.diloco.agreed import Shapes
from shoal.diloco.codec import Kind
from shoal.protocol.identity import Identity, IdentityError, Signed
from shoal.protocol.invite import Invite
from shoal.protocol.messages import AtLeast0, Message, NodeName, Number, RunId
from shoal.protocol.pace import Refusal

PIECE_BYTES = 8 << 20  # largest piece of the state in one answer
DIGEST = r"^[0-9a-f]{64}$"
Digest = Annotated[str, Field(pattern=DIGEST)]
Words = Annotated[str, Field(max_length=400)]
Size = Annotated[int, Field(ge=0, le=1 << 60)]


@dataclass(frozen=True)
class Terms:
    """Settings of a run's meeting; equal at all sites."""

    shapes: Shapes
    rounds: int  # number of rounds in the run
    kind: Kind = "fp16"
    lr: float = 0.7
    momentum: float = 0.9
    wait_s: float = 60.0  # from a round's first offer until it closes without the missing sites
    quorum: int = 1  # minimum number of offers to close a round
    sites: int = 1  # number of sites that the first round waits for
    outlier: float = 10.0  # an offer is left out if its norm is more than this many times the usual norm
    items: Callable[[int], int] | None = None  # number of work items that a round deals; None: equal work

    def weight(self, round: int, name: str, dealt: Sequence[str]) -> int:
        """Return the weight of a site's pseudo-gradient: the number of items dealt to it (`dealt_to`), or 1."""
        return len(dealt_to(name, dealt, self.items(round))) if self.items and dealt else 1


def dealt_to(name: str, dealt: Sequence[str], items: int) -> range:
    """Return the items that a site gets: of n sites, site i gets i, i + n, ..."""
    return range(dealt.index(name), items, len(dealt))


class Greeting(Message):
    """A site joins or rejoins."""

    # Facts that must be equal at all sites.
    about: dict[Annotated[str, Field(max_length=64)], Words] = Field(max_length=64)
    placed: bool  # whether the site knows where in the data it continues


class Welcome(Message):
    accepted: Annotated[int, Field(ge=-1, le=1 << 60)]  # the last round that took this site's offer; −1: none


class Figures(Message):
    """A site's report about itself, sent with an offer. It is informational only.

    Seconds and bytes are totals since the site started. The site keeps updating one object; its fields are checked when
    the meeting receives them.
    """

    model_config = ConfigDict(frozen=False)

    loss: Number | None = None  # of its last inner step
    computed_s: AtLeast0 = 0.0
    waited_s: AtLeast0 = 0.0  # waiting for data
    synced_s: AtLeast0 = 0.0  # waiting for other sites
    sent_bytes: Size = 0
    received_bytes: Size = 0


class RoundOutcome(Message):
    """How a round ended. The average is fetched separately; if `kept` is empty, there is no average."""

    round: Size
    kept: list[str]
    left_out: dict[str, str]  # site and reason
    missing: list[str]
    dealt: list[str] = []  # the sites that shared the round's work, if it was dealt
    figures: dict[str, Figures] = {}  # of each site that offered
    digest: Digest  # of the agreed parameters afterwards


class RoundProgress(Message):
    outcome: RoundOutcome | None
    waiting_for: list[str]


class Share(Message):
    number: Size


class Dealt(Message):
    sites: list[str]  # empty while sites are missing


class Why(Message):
    why: Words


class StateDescriptor(Message):
    """Describes a state file. The meeting signs this, like every answer."""

    round: Size
    sha256: Digest
    size_bytes: Size


class MeetingError(Refusal):
    """The meeting refuses a request."""

    status = 403


class RoundClosedError(MeetingError):
    """The round is over, or this site's parameters differ from the others': fetch the state and continue from there."""

    status = 409


class ForgottenError(MeetingError):
    """The meeting was restarted and has no offer of this site for the open round: offer it again."""

    status = 404


class BadOfferError(MeetingError):
    status = 422


FILES = {"model": ("config.json",), "tokenizer": ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")}


def about_model(folder: Path) -> dict[str, str]:
    """Return digests of the model's architecture and tokenizer."""
    return {what: _digest([folder / name for name in names]) for what, names in FILES.items()}


def compare(name: str, about: Mapping[str, str], ours: Mapping[str, str], first: str = "") -> None:
    """Raise MeetingError, naming the difference, if a site has another model, data or setting than the run.

    Data is compared last, because any other difference can change the data too. `first`: the site that brought the data.
    """
    for key in sorted({*ours, *about}, key=lambda key: (key == "data", key)):
        if ours.get(key) != about.get(key):
            source = f" from {first}, which joined first" if key == "data" and first else ""
            raise MeetingError(
                f"{name} has another {key}: {_short(about.get(key))}, and the run has {_short(ours.get(key))}{source}; "
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


class SiteInvite(Message):
    """The signed payload of a site's invite."""

    run: str = RunId
    name: str = NodeName


class JoinRequest(Message):
    invite: Signed
    greeting: Greeting


def site_invite(identity: Identity, url: str, run: str, name: str) -> Invite:
    """Sign an invite for one site."""
    payload = SiteInvite(run=run, name=name).model_dump_json()
    return Invite(url=url, key=identity.public, run=run, signed=Signed.make(identity, payload, domain=DOMAIN))


def name_of(invite: Invite) -> str:
    """Return the name of the site that an invite is for. Raise MeetingError for another kind of invite."""
    try:
        return SiteInvite.model_validate_json(invite.signed.open(invite.key, domain=DOMAIN)).name
    except (IdentityError, ValidationError) as error:
        raise MeetingError(
            "this is not an invite for a site: `shoal pool meet` writes site invites to its folder"
        ) from error
