"""What the meeting signs for its sites: an invite for each, and which bytes a state file has.

Invariant: nothing is believed that the meeting's key, which is in the invite, did not sign. Called by `serve`, `remote` and
`shoal meet`.
"""

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.diloco.messages import Greeting, MeetingError, Message, StateDescriptor
from shoal.protocol.identity import Identity, IdentityError, Signed
from shoal.protocol.invite import Invite

DOMAIN, STATE_DOMAIN = "site-invite", "site-state"


class SiteInvite(BaseModel):
    """What the meeting signed for one site."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: str
    name: str


class JoinRequest(Message):
    invite: Signed
    greeting: Greeting


def site_invite(identity: Identity, url: str, run: str, name: str) -> Invite:
    """The text that one site joins with."""
    payload = SiteInvite(run=run, name=name).model_dump_json()
    return Invite(url=url, key=identity.public, run=run, signed=Signed.make(identity, payload, domain=DOMAIN))


def name_of(invite: Invite) -> str:
    """The site that an invite is for. Raises MeetingError for an invite of another kind."""
    try:
        return SiteInvite.model_validate_json(invite.signed.open(invite.key, domain=DOMAIN)).name
    except (IdentityError, ValidationError) as error:
        raise MeetingError("this is not an invite for a site: `shoal meet` writes them to its folder") from error


def open_descriptor(signed: Signed, key: str, run: str) -> StateDescriptor:
    """What the meeting signed of a state file. Raises MeetingError."""
    try:
        described = StateDescriptor.model_validate_json(signed.open(key, domain=STATE_DOMAIN))
    except (IdentityError, ValidationError) as error:
        raise MeetingError(f"the state is not signed by this run's meeting: {error}") from error
    if described.run != run:
        raise MeetingError(f"the state is of run {described.run}, not {run}")
    return described
