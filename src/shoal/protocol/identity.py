"""A node's identity: one ed25519 key. The public key identifies the node everywhere in the pool.

Invariants: a signature serves one purpose, because the mandatory `domain` is signed together with the message. So a
ledger signature cannot pass as the signature of a manifest. A key has one spelling: `verify` accepts only the lowercase
hex of a canonical point. Otherwise a banned key could return under another spelling.
Left out: passphrases (because a worker restarts unattended; the file's mode protects the key), key rotation (because a
new key is a new node), hardware keys.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from pydantic import ValidationError
from pydantic_core import InitErrorDetails

from shoal.files import unique_json, write_new_file
from shoal.identity import FIELD_PRIME as FIELD_PRIME
from shoal.identity import SMALL_ORDER_Y as SMALL_ORDER_Y
from shoal.identity import IdentityError as IdentityError
from shoal.identity import public_key as public_key
from shoal.protocol.messages import Message

SIGNATURE_HEX = re.compile("[0-9a-f]{128}")
DOMAIN = re.compile("[a-z0-9._/-]{1,64}")


@dataclass(frozen=True, eq=False)
class Identity:
    """A private key, and the public key that identifies its owner."""

    private_key: Ed25519PrivateKey = field(repr=False)

    @classmethod
    def generate(cls) -> Self:
        """Return a new identity from the system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a PEM PKCS8 file. Raise IdentityError if it is missing, unreadable or not an ed25519 key."""
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except OSError as error:
            raise IdentityError(f"cannot read the key file {path} ({error.strerror}): check path and owner") from error
        except (TypeError, ValueError, UnsupportedAlgorithm):  # TypeError: it is encrypted
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise IdentityError(
                f"the key file {path} is not an ed25519 private key in PEM without a passphrase: restore it from a copy, "
                "or move it away to start as a new node"
            )
        return cls(key)

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """Load the key at `path`, or create it. Processes that start at the same time get the same key."""
        if not path.exists():
            identity = cls.generate()
            try:
                identity.save(path)
                return identity
            except FileExistsError:
                pass  # another process saved its key first: use that key
        return cls.load(path)

    def save(self, path: Path) -> None:
        """Write the key as PEM PKCS8, mode 0600, atomically. Raise FileExistsError if the path exists."""
        pem = self.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_new_file(path, pem, mode=0o600)

    @cached_property
    def public(self) -> str:
        """The public key: 64 hex characters."""
        return self.private_key.public_key().public_bytes_raw().hex()

    def sign(self, message: bytes, *, domain: str) -> str:
        """Return the signature of `message` for one purpose: 128 hex characters."""
        if not DOMAIN.fullmatch(domain):
            raise ValueError(f"bad signing domain {domain!r}: use 1 to 64 of the characters a-z 0-9 . _ / -")
        return self.private_key.sign(_in_domain(domain, message)).hex()


def verify(public: str, message: bytes, signature: str, *, domain: str) -> bool:
    """Return whether `public` signed `message` for this purpose; False if anything is malformed."""
    try:
        key = public_key(public)
    except IdentityError:
        return False
    if not (_matches(SIGNATURE_HEX, signature) and _matches(DOMAIN, domain)):
        return False
    try:
        key.verify(bytes.fromhex(signature), _in_domain(domain, message))
    except InvalidSignature:
        return False
    return True


class Signed(Message):
    """A signed text, for data that is verified independently of the request that carried it."""

    payload: str
    key: str
    signature: str

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Parse a signed text. Raise ValidationError also if a key is repeated: other readers may use the first."""
        try:
            unique_json(json_data)
        except ValueError as error:
            problem = InitErrorDetails(type="json_invalid", input="", ctx={"error": str(error)})
            raise ValidationError.from_exception_data(cls.__name__, [problem]) from error
        return super().model_validate_json(json_data, **options)

    @classmethod
    def make(cls, identity: Identity, payload: str, *, domain: str) -> Self:
        """Sign the UTF-8 bytes of `payload`."""
        signature = identity.sign(payload.encode(), domain=domain)
        return cls(payload=payload, key=identity.public, signature=signature)

    def open(self, expected_key: str, *, domain: str) -> str:
        """Return the payload, in which no key of a JSON object is repeated.

        Raise IdentityError unless `expected_key` signed it for this purpose.
        """
        if self.key != expected_key:
            raise IdentityError(f"signed by {self.key[:64]!r}, expected {expected_key}")
        if not verify(self.key, self.payload.encode(), self.signature, domain=domain):
            raise IdentityError(f"the signature of {self.key} does not match the payload in domain {domain}")
        try:
            if self.payload.startswith("{"):
                unique_json(self.payload)
        except ValueError as error:
            raise IdentityError(f"the payload that {self.key} signed is unclear: {error}") from error
        return self.payload


def _in_domain(domain: str, message: bytes) -> bytes:
    return b"shoal/" + domain.encode("ascii") + b"\n" + message


def _matches(pattern: re.Pattern[str], text: object) -> bool:
    return isinstance(text, str) and pattern.fullmatch(text) is not None
