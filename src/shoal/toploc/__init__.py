"""TOPLOC: commitments to the final hidden states of generated tokens, checked against a second forward.

A worker calls `build` on the hidden states of the tokens it generated and sends the proofs; a validator runs
its own prefill of the same tokens, calls `verify`, and judges each chunk's figures with `Thresholds`
(`PRESETS[dtype]`). Proofs are byte for byte those of the public `toploc` package (0.1.6), but where magnitudes tie at
the top_k-th place: there both packages take any, and each accepts the other's choice.

Left out: running the model, choosing which tokens to check, what a failed check costs. A proof shows which
hidden states its maker had, not how the tokens were drawn from them.

Paper: TOPLOC, arXiv 2501.16007, sections 3 and 4.
"""

from shoal.toploc.build import build, build_many
from shoal.toploc.proof import ProofError, from_base64, to_base64
from shoal.toploc.result import BFLOAT16, FLOAT16, PRESETS, ChunkResult, Thresholds
from shoal.toploc.verify import verify, verify_many

__all__ = [
    "BFLOAT16",
    "FLOAT16",
    "PRESETS",
    "ChunkResult",
    "ProofError",
    "Thresholds",
    "build",
    "build_many",
    "from_base64",
    "to_base64",
    "verify",
    "verify_many",
]
