"""The address of a pool's coordinator, and invites: one string with which a node joins.

Invariants: a URL is http(s)://HOST[:PORT] and nothing else, so signed paths are the same on both sides. A node trusts
only the coordinator's key in its invite. That key signs the invite's payload (role and name), which is valid once. A
run's id ends in digits of that key (`run_id`), so no other pool can have the same id, and a signature for one run is
invalid in every other run. Every node imports this module when it starts, so this module imports nothing heavy.
"""

import base64
import re
import secrets
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import ValidationError

from shoal.errors import UserError
from shoal.files import write_file
from shoal.protocol.identity import Identity, IdentityError, Signed
from shoal.protocol.messages import InvitePayload, Message, Role, RunId

PREFIX = "shoal1."
DOMAIN = "invite"
FILE = "coordinator.json"
# Characters that no such URL has. URL parsers disagree about some: urlsplit drops tabs, and yarl reads "１" as "1".
FOREIGN = re.compile(r"[^A-Za-z0-9._:/\[\]-]")


class AddressError(UserError):
    """A text that is not a coordinator's URL, or a folder without a coordinator's address."""


class Address(Message):
    url: str
    run: str

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the address in a coordinator's folder, or in the folder of a whole run. Raise AddressError."""
        run = folder / "coordinator" / FILE
        path = run if run.exists() else folder / FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise AddressError(f"{path} is damaged: restore the folder from its backup") from error
        except OSError as error:
            raise AddressError(
                f"{folder} is neither the folder of a run nor of a coordinator that was started: {path.name} cannot be "
                f"read there ({error.strerror})"
            ) from error

    def write(self, folder: Path) -> None:
        write_file(folder / FILE, self.model_dump_json().encode())


def server_url(text: str) -> str:
    """Return a URL without its trailing slash. Raise AddressError unless it is http(s)://HOST[:PORT]."""
    try:
        parts = urlsplit(text)
        valid_port = parts.port is None or parts.port > 0  # a malformed port raises ValueError
        (parts.hostname or "").encode("idna")  # as resolvers do; raises ValueError for an empty or too long label
    except ValueError:
        parts, valid_port = urlsplit(""), False
    rest = parts.path.strip("/") or FOREIGN.search(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or not valid_port or rest or len(text) > 150:
        raise AddressError(f"{text[:80]!r} is not a coordinator's URL: write http://HOST:PORT")
    return text.rstrip("/")


def find_coordinator(where: str) -> str:
    """Return the coordinator's URL, given the URL or a folder that has it. Raise AddressError."""
    if "://" in where:
        return server_url(where)
    if not Path(where).is_dir():
        raise AddressError(f"{where[:80]!r} is neither a folder nor a coordinator's URL, as in http://HOST:PORT")
    return Address.read(Path(where)).url


class InviteError(UserError):
    """A text that is not a valid invite; the message says what to do."""


class Invite(Message):
    url: str  # of the coordinator
    key: str  # the coordinator's public key
    run: str = RunId
    signed: Signed  # an InvitePayload

    def encode(self) -> str:
        return PREFIX + base64.urlsafe_b64encode(self.model_dump_json().encode()).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        text = text.strip()
        if not text.startswith(PREFIX):
            raise InviteError(f"not an invite: it must start with {PREFIX!r}")
        try:
            invite = cls.model_validate_json(base64.urlsafe_b64decode(text.removeprefix(PREFIX)))
            server_url(invite.url)
            if invite.encode() != text:
                raise ValueError("not the text that `encode` writes")
            return invite
        except (ValueError, AddressError) as error:  # ValueError: from base64, the text's encoding or pydantic
            raise InviteError("the invite is damaged; copy all of it again") from error

    def save(self, path: Path) -> None:
        """Write the invite to a file that only its owner may read."""
        write_file(path, self.encode().encode() + b"\n", mode=0o600)

    def check(self, role: Role, now_s: float | None) -> None:
        """Raise InviteError unless this is a valid invite for `role`, not expired at `now_s` (None: any time)."""
        payload = open_payload(self.signed.model_dump_json(), self.key, self.run)
        if payload.role != role:
            raise InviteError(f"the invite is for the role {payload.role}, not {role}; start `shoal {payload.role}`")
        if now_s is not None and now_s > payload.expires_s:
            raise InviteError(f"the invite for {payload.name} has expired; ask for a new one")
        if run_id(self.run, self.key) != self.run:
            raise InviteError(
                f"the run {self.run[:100]} does not belong to the coordinator in the invite; ask for a new invite"
            )


def run_id(name: str, coordinator_key: str) -> str:
    """Return a run's id, used in all signatures: its name and the first 16 digits of its coordinator's key.

    Return `name` unchanged if it is already such an id.
    """
    suffix = f"-{coordinator_key[:16]}"
    return name if name.endswith(suffix) else name + suffix


def make_invite(
    identity: Identity, *, url: str, run: str, role: Role, name: str, expires_s: int, open: bool = False
) -> Invite:
    """Make an invite for one node, or an `open` one for strangers with stake. Raise AddressError.

    `identity`: the coordinator's. `expires_s`: unix time.
    """
    url = server_url(url)
    payload = InvitePayload(run=run, role=role, name=name, nonce=secrets.token_hex(16), expires_s=expires_s, open=open)
    signed = Signed.make(identity, payload.model_dump_json(), domain=DOMAIN)
    return Invite(url=url, key=identity.public, run=run, signed=signed)


def open_payload(signed_json: str, coordinator_key: str, run: str) -> InvitePayload:
    """Return an invite's payload. Raise InviteError unless `coordinator_key` signed it for this run."""
    try:
        text = Signed.model_validate_json(signed_json).open(coordinator_key, domain=DOMAIN)
        payload = InvitePayload.model_validate_json(text)
    except (IdentityError, ValidationError) as error:
        raise InviteError("the invite is not signed by this coordinator") from error
    if payload.run != run:
        raise InviteError(f"the invite is for run {payload.run}, but this is run {run}")
    return payload


def read_invite(text: str) -> Invite:
    """Return an invite, given its text or the path of a file that contains it. Raise InviteError."""
    if text.startswith(PREFIX):
        return Invite.decode(text)
    try:
        content = Path(text).read_text()
    except FileNotFoundError as error:
        raise InviteError(
            f"no file at {text[:80]}, and an invite starts with {PREFIX}; make one with `shoal pool invite`"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InviteError(f"the invite in {text[:80]} is not readable: {error}") from error
    try:
        return Invite.decode(content)
    except InviteError as error:
        raise InviteError(f"{text}: {error}") from error
