"""Signed HTTP requests and their signed answers: RFC 9421 message signatures with ed25519, RFC 9530 content digests.

Invariants: a request is accepted only if the key that it names signed it, for this audience, with this method, path,
query and body, within a minute of the server's clock. Each request is accepted once. An accepted answer has the status
and body of the coordinator's answer to this very request, because the answer's signature covers the request's method,
path, query and signature, and because the server signs no answer that depends on anything else in the request. So nobody
in between can change an answer, or use it for another request or at another time.

A server verifies in three steps. `verify_head` needs the headers only, so a stranger is refused before the body is read.
`SignedHead.spend` refuses a head that was already served. `SignedHead.check_body` compares the body's hash with the signed
digest.

The signature covers the plain RFC 9421 base, so other implementations can make it. The base of a request begins with
`"@method"`. The base of an answer begins with `"@status"`. Every other signed text of the pool begins with `shoal/`. So a
signature of one kind cannot pass as one of another kind.

`SignedAuth` signs for the pool's httpx clients. Servers call `verify_head` and `sign_answer`. Clients call
`check_answer`.
Left out: answers to unsigned requests; other headers (a server must not base a decision on a header that the signature
does not cover, such as Content-Type); more than one signature.
"""

import re
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, Protocol

import httpx
from cryptography.exceptions import InvalidSignature

from shoal.protocol.identity import Identity, IdentityError, public_key

COVERED = '("@method" "@path" "@query" "content-digest" "shoal-audience")'
ANSWER_COVERED = '("@status" "content-digest" "@method";req "@path";req "@query";req "signature";req;key="shoal")'
MAX_AGE_S = 60

METHOD = re.compile("[A-Z]{1,16}")
PATH = re.compile(r"/[\x21-\x3e\x40-\x7e]*")  # visible ASCII without "?"
QUERY = re.compile(r"[\x21-\x7e]*")
AUDIENCE = re.compile(r"[\x21-\x7e]{1,200}")
CREATED = re.compile("0|[1-9][0-9]{0,11}")
NONCE = re.compile("[A-Za-z0-9_-]{16,64}")
DIGEST = re.compile("sha-256=:[A-Za-z0-9+/]{43}=:")
SIGNATURE = re.compile("shoal=:([A-Za-z0-9+/]{86}==):")
# The `signature-input` headers: covered components and parameters, in the only accepted form.
KEYID = 'keyid="([0-9a-f]{64})";alg="ed25519"'
REQUEST_INPUT = re.compile(
    f'shoal=({re.escape(COVERED)};created=({CREATED.pattern});nonce="({NONCE.pattern})";{KEYID})'
)
ANSWER_INPUT = re.compile(f"shoal=({re.escape(ANSWER_COVERED)};created=(?:{CREATED.pattern});{KEYID})")

Reason = Literal[
    "unsigned", "malformed", "wrong audience", "stale", "future", "body changed", "bad signature", "replayed", "too old"
]


class SignatureError(ValueError):
    """A request that must not be served. `reason` is for programs; the message adds details."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Reason = reason


class NonceStore(Protocol):
    """Remembers which nonces a key has used."""

    def spend(self, key: str, nonce: str, created_s: int) -> bool:
        """Record the nonce and return True. Return False if it was recorded before.

        Raise SignatureError if the request is too old for the store to tell.
        """
        ...


def sign_request(
    identity: Identity,
    *,
    method: str,
    path: str,
    query: str,
    body: bytes,
    audience: str,
    created_s: int,
    nonce: str,
) -> dict[str, str]:
    """Return the four headers that sign this request. Raise ValueError if a part cannot be signed.

    `path` and `query` are percent-encoded, `query` without its "?".
    """
    for text, pattern in (
        (method, METHOD),
        (path, PATH),
        (query, QUERY),
        (audience, AUDIENCE),
        (str(created_s), CREATED),
        (nonce, NONCE),
    ):
        if not pattern.fullmatch(text):
            raise ValueError(f"cannot sign a request with {text!r}: it must match {pattern.pattern}")
    parameters = f'{COVERED};created={created_s};nonce="{nonce}";keyid="{identity.public}";alg="ed25519"'
    base = signature_base(method, path, query, content_digest(body), audience, parameters)
    return {
        "content-digest": content_digest(body),
        "shoal-audience": audience,
        "signature-input": f"shoal={parameters}",
        "signature": f"shoal=:{b64encode(identity.private_key.sign(base)).decode()}:",
    }


@dataclass(frozen=True)
class SignedHead:
    """The verified head of a request: who signed it, and the digest that its body must have."""

    key: str
    digest: str  # the `content-digest` header
    nonce: str
    created_s: int

    def spend(self, nonces: NonceStore) -> None:
        """Raise SignatureError if this head was served before, or may have been."""
        if not nonces.spend(self.key, self.nonce, self.created_s):
            raise SignatureError("replayed", "this nonce was used before")

    def check_body(self, body_sha256: bytes, size_bytes: int) -> None:
        """Raise SignatureError unless this is the SHA-256 of the body that was signed."""
        if self.digest != digest_header(body_sha256):
            raise SignatureError("body changed", f"the body of {size_bytes} bytes does not match its digest")


def verify_head(method: str, target: str, headers: Mapping[str, str], *, audience: str, now_s: float) -> SignedHead:
    """Verify everything that needs no body. Raise SignatureError unless the named key signed this head.

    `target` is the request target as received, not decoded. Clocks may differ: `created` may be MAX_AGE_S in the past or
    future. The server must not use the body before `check_body` has passed. It calls `spend` as soon as it knows that the
    key may send this request. Then a head is served once, and a repetition is refused before its body is read.
    """
    path, query = split_target(target)
    ours = _our_headers(headers)
    claim, signature = REQUEST_INPUT.fullmatch(ours["signature-input"]), SIGNATURE.fullmatch(ours["signature"])
    if claim is None:
        raise SignatureError("malformed", f"signature-input must be shoal={COVERED};created=;nonce=;keyid=;alg=")
    if signature is None:
        raise SignatureError("malformed", "signature must hold exactly one ed25519 signature, labelled shoal")
    parameters, created_s, nonce, key = claim[1], int(claim[2]), claim[3], claim[4]
    digest, claimed_audience = ours["content-digest"], ours["shoal-audience"]
    if not (METHOD.fullmatch(method) and PATH.fullmatch(path) and QUERY.fullmatch(query)):
        raise SignatureError("malformed", "method, path or query is not percent-encoded")
    if not DIGEST.fullmatch(digest):
        raise SignatureError("malformed", "content-digest must hold exactly one sha-256 digest")
    _check_audience(claimed_audience, audience)
    _check_time(created_s, now_s)
    base = signature_base(method, path, query, digest, claimed_audience, parameters)
    try:
        public_key(key).verify(b64decode(signature[1]), base)
    except (IdentityError, InvalidSignature) as error:
        raise SignatureError("bad signature", f"{key} did not sign this request") from error
    return SignedHead(key, digest, nonce, created_s)


def signature_base(method: str, path: str, query: str, digest: str, audience: str, parameters: str) -> bytes:
    """Return the bytes that are signed (RFC 9421, section 2.5); the parts must already be checked to be visible ASCII."""
    lines = (
        f'"@method": {method}',
        f'"@path": {path}',
        f'"@query": ?{query}',
        f'"content-digest": {digest}',
        f'"shoal-audience": {audience}',
        f'"@signature-params": {parameters}',
    )
    return "\n".join(lines).encode("ascii")


def content_digest(body: bytes) -> str:
    """Return the `content-digest` header of a body (RFC 9530)."""
    return digest_header(sha256(body).digest())


def split_target(target: str) -> tuple[str, str]:
    """Split a request target as received into path and query (without "?")."""
    path, _, query = target.partition("?")
    return path, query


def _our_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return our four headers by lowercase name. Raise SignatureError if one is missing or repeated."""
    ours: dict[str, str] = {}
    for name, text in headers.items():
        lower = name.lower()
        if lower in ours:
            raise SignatureError("malformed", f"the header {lower} occurs twice")
        if lower in ("content-digest", "shoal-audience", "signature-input", "signature"):
            ours[lower] = text
    if "signature" not in ours and "signature-input" not in ours:
        raise SignatureError("unsigned", "the request carries no signature")
    if len(ours) < 4:
        raise SignatureError("malformed", f"of the four signing headers, only {sorted(ours)} are there")
    return ours


def _check_audience(claimed: str, audience: str) -> None:
    if not AUDIENCE.fullmatch(claimed):
        raise SignatureError("malformed", "shoal-audience is not 1 to 200 visible ASCII characters")
    if claimed != audience:
        raise SignatureError("wrong audience", f"signed for {claimed}, but this is {audience}")


def _check_time(created_s: int, now_s: float) -> None:
    age_s = now_s - created_s
    if age_s > MAX_AGE_S:
        raise SignatureError(
            "stale", f"signed {age_s:.0f} s ago, more than the allowed {MAX_AGE_S} s: check the clock (NTP)"
        )
    if age_s < -MAX_AGE_S:
        raise SignatureError("future", f"signed {-age_s:.0f} s ahead of this clock: check the clock (NTP)")


def digest_header(body_sha256: bytes) -> str:
    """Return the `content-digest` header of a body with this SHA-256."""
    return f"sha-256=:{b64encode(body_sha256).decode()}:"


class SignedAuth(httpx.Auth):
    """Signs every request of an httpx client, sync or async, as one identity to one audience."""

    requires_request_body = True

    def __init__(
        self,
        identity: Identity,
        audience: str,
        *,
        clock: Callable[[], float] = time.time,
        new_nonce: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self._identity = identity
        self._audience = audience
        self._clock = clock
        self._new_nonce = new_nonce

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        path, query = split_target(request.url.raw_path.decode("ascii"))
        headers = sign_request(
            self._identity,
            method=request.method,
            path=path,
            query=query,
            body=request.content,
            audience=self._audience,
            created_s=int(self._clock()),
            nonce=self._new_nonce(),
        )
        request.headers.update(headers)
        yield request


# --- answers -----------------------------------------------------------------------------------------------------------


class UnsignedAnswerError(ValueError):
    """An answer to this request that the coordinator did not sign."""


def sign_answer(
    identity: Identity,
    method: str,
    target: str,
    request_headers: Mapping[str, str],
    *,
    status: int,
    body_sha256: bytes,
    created_s: int,
) -> dict[str, str]:
    """Return the headers that sign an answer; none if the request has no signature in our form.

    `target` is the request target as received. The answer must depend only on method, target and what the request signs.
    """
    request_signature = request_headers.get("signature", "")
    if not SIGNATURE.fullmatch(request_signature):
        return {}
    digest = digest_header(body_sha256)
    parameters = f'{ANSWER_COVERED};created={created_s};keyid="{identity.public}";alg="ed25519"'
    signature = identity.private_key.sign(_answer_base(status, digest, method, target, request_signature, parameters))
    return {
        "content-digest": digest,
        "signature-input": f"shoal={parameters}",
        "signature": f"shoal=:{b64encode(signature).decode()}:",
    }


def check_answer(
    key: str, request: httpx.Request, headers: Mapping[str, str], *, status: int, body_sha256: bytes
) -> None:
    """Raise UnsignedAnswerError unless `key` signed this answer to this request."""
    claim = ANSWER_INPUT.fullmatch(headers.get("signature-input", ""))
    signature = SIGNATURE.fullmatch(headers.get("signature", ""))
    digest = headers.get("content-digest", "")
    if claim is None or signature is None:
        raise UnsignedAnswerError("it is not signed")
    if claim[2] != key:
        raise UnsignedAnswerError(f"it is signed by {claim[2]}")
    if digest != digest_header(body_sha256):
        raise UnsignedAnswerError("its body is not the one that was signed")
    target = request.url.raw_path.decode("ascii")
    base = _answer_base(status, digest, request.method, target, request.headers["signature"], claim[1])
    try:
        public_key(key).verify(b64decode(signature[1]), base)
    except InvalidSignature as error:
        raise UnsignedAnswerError("its signature does not cover this answer to this request") from error


def _answer_base(status: int, digest: str, method: str, target: str, request_signature: str, parameters: str) -> bytes:
    """Return the bytes that are signed (RFC 9421, sections 2.4 and 2.5)."""
    path, query = split_target(target)
    lines = (
        f'"@status": {status}',
        f'"content-digest": {digest}',
        f'"@method";req: {method}',
        f'"@path";req: {path}',
        f'"@query";req: ?{query}',
        f'"signature";req;key="shoal": {request_signature.removeprefix("shoal=")}',
        f'"@signature-params": {parameters}',
    )
    return "\n".join(lines).encode("ascii")
