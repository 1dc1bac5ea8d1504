"""What a run tells a machine that looks for one, and how that machine takes an open invite from it.

    offer = find_run(url, client)      GET /v1/offer, believed only with the coordinator's signature
    invite = open_invite(offer)        checked like any other

Invariant: the offer is the coordinator's own, of now: the answer is signed for this very request (`signing`). Who the key's
owner is, no answer can prove: compare the key with the operator's, or name it.
Called by `shoal discover`.
"""

from hashlib import sha256

import httpx
from pydantic import ValidationError

from shoal.config.checking import RequirementsSection
from shoal.errors import ShoalError
from shoal.protocol.calling import BodyError, get
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite, open_payload, server_url
from shoal.protocol.messages import VERSION, RunOffer
from shoal.protocol.signing import SignedAuth, UnsignedAnswerError, check_answer

AUDIENCE = "offer"
MOST_BYTES = 64 << 10


class DiscoveryError(ShoalError):
    """An offer that did not come or cannot be believed, or a run that takes no strangers."""


def find_run(url: str, client: httpx.Client, key: str = "") -> RunOffer:
    """What the run at `url` offers. `key`: its coordinator's, if it is known. Raises DiscoveryError, AddressError."""
    url = server_url(url)
    response = _ask(url, client)
    try:
        offer = RunOffer.model_validate_json(response.content)
        digest, headers = sha256(response.content).digest(), response.request.headers
        check_answer(key or offer.key, headers, response.headers, status=response.status_code, body_sha256=digest)
        RequirementsSection.model_validate(offer.requirements)
    except UnsignedAnswerError as error:
        raise DiscoveryError(f"the offer of the run at {url} cannot be trusted: {error}") from error
    except ValidationError as error:
        raise DiscoveryError(f"what {url}/v1/offer answers is no offer of this version of Shoal") from error
    if offer.protocol != VERSION:
        raise DiscoveryError(f"{url} speaks protocol {offer.protocol}, this machine {VERSION}: install its version")
    return offer


def open_invite(offer: RunOffer) -> Invite:
    """The open invite in an offer. Raises DiscoveryError; InviteError if it is not the run's."""
    if not offer.invite:
        raise DiscoveryError(f"{offer.run} takes only workers with an invite; ask its operator for one")
    invite = Invite.decode(offer.invite)
    if (invite.key, invite.run) != (offer.key, offer.run):
        raise DiscoveryError(f"the invite that {offer.run} offers is of another run; tell its operator")
    invite.check("worker", None)
    if not open_payload(invite.signed.model_dump_json(), invite.key, invite.run).open:
        raise DiscoveryError(f"the invite that {offer.run} offers is for one node only; tell its operator")
    return invite


def _ask(url: str, client: httpx.Client) -> httpx.Response:
    """Ask with a key made for it: an answer to another request, or an old one, does not fit."""
    try:
        response = get(client, f"{url}/v1/offer", MOST_BYTES, auth=SignedAuth(Identity.generate(), AUDIENCE))
    except BodyError as error:
        raise DiscoveryError(f"the offer of the run at {url} is not read: {error}; tell its operator") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DiscoveryError(
            f"nothing answers at {url} ({error or type(error).__name__}); is the URL right and reachable?"
        ) from error
    if response.status_code != 200:
        raise DiscoveryError(f"{url}/v1/offer answers {response.status_code}: no Shoal coordinator of this version")
    return response
