"""The origin's signed statement of its newest version, by which readers notice servers that are behind.

Invariant: an origin's statements have increasing times, also after a restart. Of two, the later one is right.
Called by the origin (sign, every few seconds) and by relays and clients (open). It travels in versions.json.
Left out: proof that a reader was shown the latest statement; `shoal fetch --max-age` refuses old ones.
Source: the timestamp role of The Update Framework.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.shardcast.format.manifest import MAX_VERSION, Manifest

# Domain separation: nothing else that this key signs can be taken for a statement.
SIGNATURE_DOMAIN = b"shoal shardcast newest 1\n"


class Newest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    run: str = Field(max_length=200)
    version: int = Field(ge=0, le=MAX_VERSION)
    created_s: float = Field(ge=0)  # of its manifest; seconds since 1970
    as_of_s: float = Field(ge=0)  # when this was said

    def outdates(self, manifest: Manifest) -> bool:
        """Whether the manifest is from before the origin started over: a higher number, but older."""
        return manifest.version > self.version and manifest.created_s < self.created_s


class SignedNewest(BaseModel):
    """A statement as it is sent. Untrusted until `open` has verified it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    statement: str = Field(max_length=1000)  # JSON text
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")

    @classmethod
    def sign(cls, newest: Newest, private_key: Ed25519PrivateKey) -> SignedNewest:
        text = newest.model_dump_json()
        return cls(statement=text, signature=private_key.sign(SIGNATURE_DOMAIN + text.encode()).hex())

    def open(self, public_key: str, *, run: str | None = None) -> Newest | None:
        """The statement; None unless this key signed it, for this run if one is given."""
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(
                bytes.fromhex(self.signature), SIGNATURE_DOMAIN + self.statement.encode()
            )
            newest = Newest.model_validate_json(self.statement)
        except (InvalidSignature, ValidationError):
            return None
        return newest if run in (None, newest.run) else None
