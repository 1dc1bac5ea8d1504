"""The nonce of an assignment: what makes its tasks and seeds unpredictable before it is given out.

    nonce = HMAC-SHA256(secret, run, worker, number, version), its first 128 bits

Invariant: the same assignment always gets the same nonce, also after kill -9, because nothing has to be remembered but the
coordinator's key. Without that key nobody can tell a nonce from random bits. The nonce is in the table of
submissions, in the ledger and in the submitted file, so anyone who has them can derive the tasks again.
Called by `assignments`. Left out: another secret for a coordinator that returns to an older copy of its database. It gives
the same numbers the same nonces again, so a worker knows those tasks which it had already held.
"""

import hashlib
import hmac

from shoal.protocol.identity import Identity

NONCE_HEX = 32


def nonce_secret(identity: Identity) -> bytes:
    """The key of all nonces: it follows from the coordinator's private key and serves nothing else."""
    return hmac.digest(identity.private_key.private_bytes_raw(), b"shoal/assignment-nonces", hashlib.sha256)


def assignment_nonce(secret: bytes, run: str, worker: str, number: int, version: int) -> str:
    name = f"{run}\n{worker}\n{number}\n{version}".encode()
    return hmac.digest(secret, name, hashlib.sha256).hex()[:NONCE_HEX]
