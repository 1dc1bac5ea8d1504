"""Signed answers of the coordinator: RFC 9421 response signatures, each bound to the request it answers.

Invariant: an accepted answer has the status and body with which the coordinator answered this very request: the signature
covers the request's own, which is over its method, path, body, audience and nonce. So nobody on the way can change an
answer, nor give the answer to another request, or of another time. It also says when it was given (`clock`).
The base begins with `"@status"`: none of the pool's other signatures does.
Signed by `server`, checked by `calling`. Left out: answers to requests without a signature; an answer that does not come.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping

from cryptography.exceptions import InvalidSignature

from shoal.errors import ShoalError
from shoal.protocol.identity import Identity, public_key
from shoal.protocol.signing import SIGNATURE, digest_header, read_input

COVERED = '("@status" "content-digest" "signature";req;key="shoal")'
PARAMETERS = {"created", "keyid", "alg"}


class Refusal(ShoalError):
    """A request that is not served, and why; `status` is its HTTP status."""

    status = 409

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        if status is not None:
            self.status = status


class UnsignedAnswerError(ValueError):
    """An answer that the coordinator did not give to this request."""


def sign_answer(
    identity: Identity, request_headers: Mapping[str, str], *, status: int, body_sha256: bytes, created_s: int
) -> dict[str, str]:
    """The headers that sign an answer given at `created_s`; none if the request carries no signature in our form."""
    asked = request_headers.get("signature", "")
    if not SIGNATURE.fullmatch(asked):
        return {}
    digest = digest_header(body_sha256)
    parameters = f'{COVERED};created={created_s};keyid="{identity.public}";alg="ed25519"'
    signature = identity.private_key.sign(_base(status, digest, asked, parameters))
    return {
        "content-digest": digest,
        "signature-input": f"shoal={parameters}",
        "signature": f"shoal=:{b64encode(signature).decode()}:",
    }


def check_answer(
    key: str, request_headers: Mapping[str, str], headers: Mapping[str, str], *, status: int, body_sha256: bytes
) -> int:
    """When `key` gave this answer to the request, by its clock. Raises UnsignedAnswerError unless it gave it."""
    header = headers.get("signature-input", "")
    stated = read_input(header, COVERED, PARAMETERS)
    signature = SIGNATURE.fullmatch(headers.get("signature", ""))
    digest = headers.get("content-digest", "")
    if stated is None or signature is None:
        raise UnsignedAnswerError("it is not signed")
    if stated["keyid"] != key:
        raise UnsignedAnswerError(f"it is signed by {stated['keyid']}")
    if digest != digest_header(body_sha256):
        raise UnsignedAnswerError("its body is not the one that was signed")
    base = _base(status, digest, request_headers["signature"], header.removeprefix("shoal="))
    try:
        public_key(key).verify(b64decode(signature[1]), base)
    except InvalidSignature as error:
        raise UnsignedAnswerError("its signature is not over this answer to this request") from error
    return int(stated["created"])


def _base(status: int, digest: str, asked: str, parameters: str) -> bytes:
    """What is signed (RFC 9421, sections 2.4 and 2.5). `asked`: the request's `signature` header, in our form."""
    lines = (
        f'"@status": {status}',
        f'"content-digest": {digest}',
        f'"signature";req;key="shoal": {asked.removeprefix("shoal=")}',
        f'"@signature-params": {parameters}',
    )
    return "\n".join(lines).encode("ascii")
