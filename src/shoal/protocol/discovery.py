"""Which runs a listener has: its signed list, and how a machine takes an open invite from it.

    found = find_runs(url, client)      GET /runs, believed only with the signature of `found.key`
    invite = found.invite("sums")       the open invite of one of them, checked like any other

Invariant: the list is the listener's own, of now: its answer is signed for this very request (`answers`), and the list once
more by the same key. Who the key's owner is, the list cannot prove: compare the key with the operator's, or name it.
Called by `shoal discover`.
"""

from dataclasses import dataclass
from hashlib import sha256

import httpx
from pydantic import ValidationError

from shoal.config.checking import RequirementsSection
from shoal.errors import ShoalError
from shoal.protocol.address import coordinator_url, split_url
from shoal.protocol.answers import UnsignedAnswerError, check_answer
from shoal.protocol.bodies import BodyError, get
from shoal.protocol.identity import Identity, IdentityError, Signed
from shoal.protocol.invite import Invite, open_payload
from shoal.protocol.messages import VERSION, RunList
from shoal.protocol.signing import SignedAuth

DOMAIN = AUDIENCE = "runs"
MOST_BYTES = 4 << 20  # of a list


class DiscoveryError(ShoalError):
    """A list of runs that did not come or cannot be believed, or a run that cannot be joined from it."""


@dataclass(frozen=True)
class FoundRuns:
    url: str  # the listener's
    key: str  # the listener's
    runs: RunList

    def invite(self, name: str) -> Invite:
        """The open invite of the run with this place or id. Raises DiscoveryError; InviteError if it is not the run's."""
        offer = next((one for one in self.runs.runs if name in (one.place, one.run)), None)
        if offer is None:
            why = next((f"closed: {one.why}" for one in self.runs.closed if one.place == name), "not listed")
            raise DiscoveryError(f"the run {name} at {self.url} is {why}; `shoal discover {self.url}` lists the others")
        if not offer.invite:
            raise DiscoveryError(f"the run {name} takes only workers with an invite; ask its operator for one")
        invite = Invite.decode(offer.invite)
        if (invite.url, invite.key, invite.run) != (offer.url, offer.key, offer.run):
            raise DiscoveryError(f"the invite that {self.url} lists for {name} is of another run; tell its operator")
        invite.check("worker", None)
        if not open_payload(invite.signed.model_dump_json(), invite.key, invite.run).open:
            raise DiscoveryError(f"the invite that {self.url} lists for {name} is for one node only; tell its operator")
        return invite


def find_runs(url: str, client: httpx.Client, key: str = "") -> FoundRuns:
    """The runs at a listener, whose URL may name one of them. `key`: the listener's, if it is known.

    Raises DiscoveryError, AddressError.
    """
    listener, _ = split_url(coordinator_url(url))
    body, request, response = _ask(listener, client)
    try:
        signed = Signed.model_validate_json(body)
        expected = key or signed.key
        digest = sha256(body).digest()
        check_answer(expected, request.headers, response.headers, status=response.status_code, body_sha256=digest)
        found = RunList.model_validate_json(signed.open(expected, domain=DOMAIN))
        for offer in found.runs:
            RequirementsSection.model_validate(offer.requirements)
    except (UnsignedAnswerError, IdentityError) as error:
        raise DiscoveryError(f"the list of runs at {listener} cannot be trusted: {error}") from error
    except ValidationError as error:
        raise DiscoveryError(f"what {listener}/runs answers is not a list of runs of this version of Shoal") from error
    if found.protocol != VERSION:
        raise DiscoveryError(
            f"{listener} speaks protocol {found.protocol}, this machine {VERSION}: install its version"
        )
    return FoundRuns(listener, expected, found)


def _ask(listener: str, client: httpx.Client) -> tuple[bytes, httpx.Request, httpx.Response]:
    """Ask with a key made for it: an answer to another request, or an old one, does not fit."""
    try:
        response = get(client, f"{listener}/runs", MOST_BYTES, auth=SignedAuth(Identity.generate(), AUDIENCE))
    except BodyError as error:
        raise DiscoveryError(f"the list of runs at {listener} is not read: {error}; tell its operator") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DiscoveryError(
            f"nothing answers at {listener} ({error or type(error).__name__}); is the URL right and reachable?"
        ) from error
    if response.status_code != 200:
        raise DiscoveryError(f"{listener}/runs answers {response.status_code}: no Shoal coordinator of this version")
    return response.content, response.request, response
