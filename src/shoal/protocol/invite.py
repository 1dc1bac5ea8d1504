"""Invites: one string with all a node needs to join: where the coordinator is, whom to believe, what it may be.

Invariant: the coordinator's key inside is the root of a node's trust; the payload is signed by that key and spent once.
Made by `shoal invite` (and `shoal run`), read by every node at its start.
"""

import base64
import secrets
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.errors import ShoalError
from shoal.protocol.identity import Identity, IdentityError, Signed
from shoal.protocol.messages import InvitePayload, Role

PREFIX = "shoal1."
DOMAIN = "invite"


class InviteError(ShoalError):
    """A string that is no invite of this run."""


class Invite(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str  # of the coordinator
    key: str  # the coordinator's public key
    run: str
    signed: Signed  # an InvitePayload

    def encode(self) -> str:
        return PREFIX + base64.urlsafe_b64encode(self.model_dump_json().encode()).decode()

    @classmethod
    def decode(cls, text: str) -> "Invite":
        text = text.strip()
        if not text.startswith(PREFIX):
            raise InviteError(f"not an invite: it must start with {PREFIX!r}")
        try:
            return cls.model_validate_json(base64.urlsafe_b64decode(text.removeprefix(PREFIX)))
        except ValueError as error:  # base64's, the text's encoding, or pydantic's
            raise InviteError("the invite is damaged; copy it again, whole") from error


def make_invite(identity: Identity, *, url: str, run: str, role: Role, name: str, expires_s: int) -> Invite:
    """An invite for one node; `identity` is the coordinator's, expires_s a unix time."""
    payload = InvitePayload(run=run, role=role, name=name, nonce=secrets.token_hex(16), expires_s=expires_s)
    signed = Signed.make(identity, payload.model_dump_json(), domain=DOMAIN)
    return Invite(url=url, key=identity.public, run=run, signed=signed)


def open_payload(signed_json: str, coordinator_key: str, run: str) -> InvitePayload:
    """The payload of an invite that `coordinator_key` signed for this run. Raises InviteError."""
    try:
        text = Signed.model_validate_json(signed_json).open(coordinator_key, domain=DOMAIN)
        payload = InvitePayload.model_validate_json(text)
    except (IdentityError, ValidationError) as error:
        raise InviteError("the invite is not signed by this coordinator") from error
    if payload.run != run:
        raise InviteError(f"the invite is for run {payload.run}, this is {run}")
    return payload


def read_invite(text: str) -> Invite:
    """An invite given as its text, or as the path of a file that holds it. Raises InviteError."""
    path = Path(text)
    return Invite.decode(path.read_text() if not text.startswith("shoal1.") and path.is_file() else text)
