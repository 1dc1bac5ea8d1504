"""The one place that reads public keys. A key has one spelling, and no signature can be made without a private key.

`protocol.identity` has private keys and signed texts. This module stands alone, so that libraries can use it.
"""

import re

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shoal.errors import UserError

PUBLIC_HEX = re.compile("[0-9a-f]{64}")
FIELD_PRIME = 2**255 - 19
ORDER_8_Y = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
# The y of the eight points of small order. With such a public key, a signature made without any private key is valid.
SMALL_ORDER_Y = {0, 1, FIELD_PRIME - 1, ORDER_8_Y, FIELD_PRIME - ORDER_8_Y}


class IdentityError(UserError, ValueError):
    """A key file, a public key or a signed payload that cannot be used; the message says what to do."""


def public_key(public: str) -> Ed25519PublicKey:
    """Parse a public key. Raise IdentityError unless it is the canonical spelling of a safe point."""
    if not isinstance(public, str) or not PUBLIC_HEX.fullmatch(public):
        raise IdentityError("a public key is 64 lowercase hex characters")
    raw = bytes.fromhex(public)
    y = int.from_bytes(raw, "little") & (2**255 - 1)  # the top bit is the sign of x
    if y >= FIELD_PRIME or y in SMALL_ORDER_Y:
        raise IdentityError(f"the public key {public} is not a safe point of the curve")
    return Ed25519PublicKey.from_public_bytes(raw)
