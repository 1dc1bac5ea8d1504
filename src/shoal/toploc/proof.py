"""The bytes of a proof: a modulus and the coefficients of one polynomial.

    big-endian uint16 modulus | top_k big-endian uint16 coefficients, ascending powers     2 + 2 * top_k bytes

Invariant: `parse` returns only canonical proofs (exact length, modulus in [MODULUS_MIN, PRIME], coefficients in
GF(PRIME)). Anything else raises ProofError, which names the sequence and the proof.
The caller must know the number of tokens, the dtype and top_k, because the format does not contain them.

Paper: TOPLOC section 3; format of the public `toploc` 0.1.6.
"""

import base64
import binascii
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.toploc.field import PRIME

# The modulus of an honest proof is PRIME or slightly less. A small modulus would map all tokens to the same few x: with
# modulus H, x is the hidden dimension. Then a prover without the hidden states could commit to typical values of
# each dimension.
MODULUS_MIN = 2**15 + 1


class ProofError(ValueError):
    """No proof can be made, or the bytes are not a proof.

    `sequence` and `proof` are indices; `proof` is None if the error concerns the whole sequence.
    """

    def __init__(self, reason: str, *, sequence: int = 0, proof: int | None = None) -> None:
        self.sequence, self.proof = sequence, proof
        where = f"sequence {sequence}" if proof is None else f"sequence {sequence}, proof {proof}"
        super().__init__(f"{where}: {reason}")


def size_bytes(top_k: int) -> int:
    """Return the length of one proof: 258 at top_k 128."""
    return 2 + 2 * top_k


def injective_modulus(index_BK: Tensor) -> Tensor:
    """Return the largest modulus (B,) in [MODULUS_MIN, PRIME] that keeps each row's indices distinct.

    Raise ValueError if no such modulus exists, because top_k is far above 1024 or an index is repeated.
    """
    modulus_B = torch.full_like(index_BK[:, 0], PRIME)
    # Indices below PRIME are their own residues, so only rows with larger indices need a search.
    open_R = torch.nonzero(index_BK.amax(dim=1) >= PRIME).flatten()
    for candidate in range(PRIME, MODULUS_MIN - 1, -1):
        if not len(open_R):
            break
        residue_RK = (index_BK[open_R] % candidate).sort(dim=1).values
        distinct_R = (residue_RK[:, 1:] != residue_RK[:, :-1]).all(dim=1)
        modulus_B[open_R[distinct_R]] = candidate
        open_R = open_R[~distinct_R]
    if len(open_R):
        raise ValueError(f"no modulus keeps {index_BK.shape[1]} indices distinct: use a smaller top_k")
    return modulus_B


def serialise(modulus_B: Tensor, coefficients_BK: Tensor) -> list[bytes]:
    """Return one proof per row."""
    words = torch.cat([modulus_B[:, None], coefficients_BK], dim=1).cpu().numpy().astype(">u2")
    return [row.tobytes() for row in words]


def parse(proofs: Sequence[bytes], *, top_k: int, sequence: int = 0) -> tuple[Tensor, Tensor]:
    """Return the moduli (B,) and coefficients (B, top_k) of a sequence's proofs. Raise ProofError for the first bad one."""
    for index, proof in enumerate(proofs):
        if not isinstance(proof, bytes):
            raise ProofError(f"expected bytes, got {type(proof).__name__}", sequence=sequence, proof=index)
        if len(proof) != size_bytes(top_k):
            reason = f"{len(proof)} bytes, expected {size_bytes(top_k)} at top_k {top_k}"
            raise ProofError(reason, sequence=sequence, proof=index)
    words = np.frombuffer(b"".join(proofs), dtype=">u2").astype(np.int64).reshape(len(proofs), 1 + top_k)
    modulus_B, coefficients_BK = torch.from_numpy(words[:, 0]), torch.from_numpy(words[:, 1:])
    for index, modulus in enumerate(modulus_B.tolist()):
        if modulus == 0:
            raise ProofError("null proof (modulus 0)", sequence=sequence, proof=index)
        if not MODULUS_MIN <= modulus <= PRIME:
            reason = f"modulus {modulus} outside [{MODULUS_MIN}, {PRIME}]"
            raise ProofError(reason, sequence=sequence, proof=index)
    for index, largest in enumerate(coefficients_BK.amax(dim=1).tolist()):
        if largest >= PRIME:
            raise ProofError(f"coefficient {largest} is not below {PRIME}", sequence=sequence, proof=index)
    return modulus_B, coefficients_BK


def to_base64(proof: bytes) -> str:
    """Encode a proof as text: 344 characters at top_k 128."""
    return base64.b64encode(proof).decode("ascii")


def from_base64(text: str) -> bytes:
    """Decode the text form of a proof; `verify` checks the content.

    Raise ProofError unless `text` is exactly what `to_base64` writes: whitespace, another alphabet, missing padding and
    unused bits that are set are refused.
    """
    if not isinstance(text, str):
        raise ProofError(f"expected text, got {type(text).__name__}")
    try:
        proof = base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise ProofError(f"not base64: {error}") from error
    if to_base64(proof) != text:
        raise ProofError("not canonical base64")
    return proof
