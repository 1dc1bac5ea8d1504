"""Signed HTTP requests: RFC 9421 message signatures with ed25519, RFC 9530 content digests.

Invariant: a request that `verify_request` accepts was made by the named key, for this audience, with this
method, path, query and body, within a minute of our clock, and is accepted once.

The signature is over the bare RFC 9421 base, as any other implementation makes it. The base begins with
`"@method"`, and all other signatures of the pool with `shoal/`, so neither can serve as the other.

`SignedAuth` is called by everything that speaks to the pool through httpx; `verify_request` by its servers,
with path and query as they came over the wire (`split_target`), never decoded.

Left out: responses (integrity comes from signed manifests and hashes), streamed bodies, headers beyond ours
(a server must not let an uncovered header, such as Content-Type, decide anything), more than one signature.
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
MAX_AGE_S = 60

METHOD = re.compile("[A-Z]{1,16}")
PATH = re.compile(r"/[\x21-\x3e\x40-\x7e]*")  # visible ASCII without "?"
QUERY = re.compile(r"[\x21-\x7e]*")
AUDIENCE = re.compile(r"[\x21-\x7e]{1,200}")
CREATED = re.compile("0|[1-9][0-9]{0,11}")
NONCE = re.compile("[A-Za-z0-9_-]{16,64}")
DIGEST = re.compile("sha-256=:[A-Za-z0-9+/]{43}=:")
SIGNATURE = re.compile("shoal=:([A-Za-z0-9+/]{86}==):")
SIGNATURE_INPUT = re.compile(
    f"shoal={re.escape(COVERED)};created=({CREATED.pattern});"
    f'nonce="({NONCE.pattern})";keyid="([0-9a-f]{{64}})";alg="ed25519"'
)

Reason = Literal[
    "unsigned", "malformed", "wrong audience", "stale", "future", "body changed", "bad signature", "replayed"
]


class SignatureError(ValueError):
    """A request that must not be served: `reason` is for programs, the message adds detail for a log."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Reason = reason


class NonceStore(Protocol):
    """Remembers which nonces a key has used."""

    def spend(self, key: str, nonce: str, created_s: int) -> bool:
        """Record the nonce and return True, or return False if it may have been recorded before."""
        ...


@dataclass(frozen=True)
class _Parameters:
    """What the `signature-input` header says beside the covered components."""

    created_s: int
    nonce: str
    key: str

    def __str__(self) -> str:
        return f'{COVERED};created={self.created_s};nonce="{self.nonce}";keyid="{self.key}";alg="ed25519"'


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
    """Return the four headers that make this request the identity's own.

    path and query are in wire form (percent-encoded), query without its "?". ValueError when a part cannot
    be signed.
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
    parameters = _Parameters(created_s, nonce, identity.public)
    base = signature_base(method, path, query, content_digest(body), audience, str(parameters))
    return {
        "content-digest": content_digest(body),
        "shoal-audience": audience,
        "signature-input": f"shoal={parameters}",
        "signature": f"shoal=:{b64encode(identity.private_key.sign(base)).decode()}:",
    }


def verify_request(
    *,
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    body: bytes,
    audience: str,
    now_s: float,
    nonces: NonceStore,
    max_age_s: int = MAX_AGE_S,
) -> str:
    """Return the public key that made the request; SignatureError for every other request.

    Clocks may differ: `created` may lie max_age_s in the past or in the future. The nonce is spent last, so
    that a forged request cannot use up the nonce of a real one.
    """
    ours = _our_headers(headers)
    parameters, signature = _parse_signature(ours)
    digest, claimed_audience = ours["content-digest"], ours["shoal-audience"]
    if not (METHOD.fullmatch(method) and PATH.fullmatch(path) and QUERY.fullmatch(query)):
        raise SignatureError("malformed", "method, path or query is not in wire form")
    _check_audience(claimed_audience, audience)
    _check_time(parameters.created_s, now_s, max_age_s)
    _check_body(digest, body)
    base = signature_base(method, path, query, digest, claimed_audience, str(parameters))
    _check_signature(parameters.key, base, signature)
    if not nonces.spend(parameters.key, parameters.nonce, parameters.created_s):
        raise SignatureError("replayed", "this nonce was used, or is older than what the nonce store remembers")
    return parameters.key


def signature_base(method: str, path: str, query: str, digest: str, audience: str, parameters: str) -> bytes:
    """Return the bytes that are signed (RFC 9421, section 2.5); each part must be checked visible ASCII."""
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
    return f"sha-256=:{b64encode(sha256(body).digest()).decode()}:"


def split_target(target: str) -> tuple[str, str]:
    """Split a request target as it came over the wire into path and query (without "?")."""
    path, _, query = target.partition("?")
    return path, query


def _our_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Pick our four headers in any case; a multi-dict's repeated header is refused, not resolved."""
    ours: dict[str, str] = {}
    for name, text in headers.items():
        lower = name.lower()
        if lower in ours:
            raise SignatureError("malformed", f"the header {lower} comes twice")
        if lower in ("content-digest", "shoal-audience", "signature-input", "signature"):
            ours[lower] = text
    if "signature" not in ours and "signature-input" not in ours:
        raise SignatureError("unsigned", "the request carries no signature")
    if len(ours) < 4:
        raise SignatureError("malformed", f"of the four signing headers only {sorted(ours)} came")
    return ours


def _parse_signature(ours: Mapping[str, str]) -> tuple[_Parameters, bytes]:
    """Read exactly the form that `sign_request` writes; RFC 9421 allows more, we need none of it."""
    stated = SIGNATURE_INPUT.fullmatch(ours["signature-input"])
    signature = SIGNATURE.fullmatch(ours["signature"])
    if stated is None:
        raise SignatureError("malformed", f"signature-input must cover exactly {COVERED}, once, in our form")
    if signature is None:
        raise SignatureError("malformed", "signature must hold exactly one ed25519 signature")
    created, nonce, key = stated.groups()
    return _Parameters(int(created), nonce, key), b64decode(signature[1])


def _check_audience(claimed: str, audience: str) -> None:
    if not AUDIENCE.fullmatch(claimed):
        raise SignatureError("malformed", "shoal-audience is not 1 to 200 visible ASCII characters")
    if claimed != audience:
        raise SignatureError("wrong audience", f"signed for {claimed}, this is {audience}")


def _check_time(created_s: int, now_s: float, max_age_s: int) -> None:
    age_s = now_s - created_s
    if age_s > max_age_s:
        raise SignatureError("stale", f"signed {age_s:.0f} s ago, at most {max_age_s} s is served: check the clock")
    if age_s < -max_age_s:
        raise SignatureError("future", f"signed {-age_s:.0f} s ahead of this clock: check the clock")


def _check_body(digest: str, body: bytes) -> None:
    if not DIGEST.fullmatch(digest):
        raise SignatureError("malformed", "content-digest must hold exactly one sha-256 digest")
    if digest != content_digest(body):
        raise SignatureError("body changed", f"the body of {len(body)} bytes does not match its digest")


def _check_signature(key: str, base: bytes, signature: bytes) -> None:
    try:
        public_key(key).verify(signature, base)
    except (IdentityError, InvalidSignature) as error:
        raise SignatureError("bad signature", f"{key} did not sign this request") from error


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
