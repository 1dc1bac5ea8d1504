"""TOPLOC: commitments to the final hidden states of generated tokens, checked against a second forward pass.

A worker calls `build` on the hidden states of the tokens that it generated, and sends the proofs. A validator runs its own
prefill of the same tokens, calls `verify`, and compares each chunk's errors with `Thresholds` (`BFLOAT16`). The proofs
equal those of the public `toploc` package (0.1.6) byte for byte, unless several magnitudes tie for the top_k-th place.
In that case the two packages may choose different entries, but each package accepts the proofs of the other.

This package does not run the model, choose which tokens to check, or decide what follows from a failed check. A proof
shows which hidden states its author had. It does not show how tokens were sampled from them.

Paper: TOPLOC, arXiv 2501.16007, sections 3 and 4.
"""

from shoal.toploc.proof import ProofError, from_base64, parse, to_base64
from shoal.toploc.prove import (
    BFLOAT16,
    ChunkResult,
    Thresholds,
    build,
    build_many,
    verify,
    verify_many,
)

__all__ = [
    "BFLOAT16",
    "ChunkResult",
    "ProofError",
    "Thresholds",
    "build",
    "build_many",
    "from_base64",
    "parse",
    "to_base64",
    "verify",
    "verify_many",
]
