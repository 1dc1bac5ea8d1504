"""Verifying proofs: the validator's side.

Invariant: one ChunkResult per chunk of the verifier's own hidden states, never fewer. A malformed, missing or extra proof
raises ProofError.
Called by the validator with its own prefill of the worker's tokens. Leaves out the verdict (`result.Thresholds`) and a
separate comparison of indices: an entry that only the verifier chose evaluates to a random value and is a mismatch.

Given one tensor, the public package finds the same figures, except for the median (see ChunkResult). Given a list of
activations, prefill first, it ignores the modulus and rejects honest proofs, including its own, if that is not 65497.

Paper: TOPLOC section 3 (verification) and 4 (error metrics).
"""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from shoal.toploc.chunk import peaks
from shoal.toploc.field import evaluate
from shoal.toploc.proof import ProofError, parse
from shoal.toploc.result import ChunkResult

# The leading coefficients of an interpolant of real data are uniform: all eight are zero once in 65497^8. In a forged
# polynomial of low degree, such as a constant, they are zero. Unless every value is exact, no entry of such a chunk agrees.
_LEADING = 8


def verify(
    hidden_TH: Tensor,
    proofs: Sequence[bytes],
    *,
    chunk_tokens: int = 32,
    top_k: int = 128,
    prefill_tokens: int = 0,
) -> list[ChunkResult]:
    """Compare one sequence's proofs with the verifier's own hidden states of the same tokens.

    `chunk_tokens`, `top_k`, `prefill_tokens` and the dtype (float32 counts as bfloat16) must be the prover's.
    Raises ProofError if a proof is malformed or the number of proofs is wrong. Raises ValueError if `hidden_TH` itself is
    unusable, which is not evidence against the prover.
    """
    (results,) = verify_many(
        [hidden_TH], [proofs], chunk_tokens=chunk_tokens, top_k=top_k, prefill_tokens=prefill_tokens
    )
    return results


def verify_many(
    hiddens: Sequence[Tensor],
    proofs: Sequence[Sequence[bytes]],
    *,
    chunk_tokens: int = 32,
    top_k: int = 128,
    prefill_tokens: int | Sequence[int] = 0,
) -> list[list[ChunkResult]]:
    """`verify` for each sequence, with the arithmetic of all chunks batched on the hidden states' device.

    The first malformed proof raises for the whole call. ProofError.sequence is its sequence, so that a caller with several
    provers can drop it and call again.
    """
    if len(hiddens) != len(proofs):
        raise ValueError(f"{len(hiddens)} sequences but proofs for {len(proofs)}")
    own = peaks(hiddens, chunk_tokens=chunk_tokens, top_k=top_k, prefill_tokens=prefill_tokens)
    parsed = []
    for sequence, (expected, given) in enumerate(zip(own.chunks_per_sequence, proofs, strict=True)):
        if len(given) != expected:
            fault = "missing" if len(given) < expected else "extra"
            reason = f"{fault}: {len(given)} proofs for {expected} chunks"
            raise ProofError(reason, sequence=sequence, proof=min(len(given), expected))
        parsed.append(parse(given, top_k=top_k, sequence=sequence))
    modulus_B = torch.cat([modulus for modulus, _ in parsed]).to(own.index_BK.device)
    coefficients_BK = torch.cat([coefficients for _, coefficients in parsed]).to(own.index_BK.device)

    proven_BK = evaluate(coefficients_BK, own.index_BK % modulus_B[:, None])
    low_degree_B = (coefficients_BK[:, -_LEADING:] == 0).all(dim=1)
    forged_B = low_degree_B & (proven_BK != own.bits_BK).any(dim=1)
    results = iter(compare(own.bits_BK, proven_BK, forged_B, mantissa_bits=own.mantissa_bits))
    return [[next(results) for _ in range(count)] for count in own.chunks_per_sequence]


def compare(own_BK: Tensor, proven_BK: Tensor, forged_B: Tensor, *, mantissa_bits: int) -> list[ChunkResult]:
    """The errors of each row of raw 16-bit values. No entry of a row in `forged_B` agrees."""
    exponent_own_BK = (own_BK & 0x7FFF) >> mantissa_bits
    exponent_proven_BK = (proven_BK & 0x7FFF) >> mantissa_bits
    mantissa_mask = (1 << mantissa_bits) - 1
    agree_BK = (exponent_own_BK == exponent_proven_BK) & ~forged_B[:, None]
    error_BK = ((own_BK & mantissa_mask) - (proven_BK & mantissa_mask)).abs().double()

    agreeing_B = agree_BK.sum(dim=1)
    mean_B = error_BK.where(agree_BK, 0.0).sum(dim=1) / agreeing_B.clamp(min=1)
    mean_B[agreeing_B == 0] = inf
    # Disagreeing entries are infinities and sort last; with none agreeing the median is infinite too.
    ascending_BK = error_BK.where(agree_BK, inf).sort(dim=1).values
    middle_B2 = torch.stack([(agreeing_B - 1).clamp(min=0) // 2, agreeing_B // 2], dim=1)
    median_B = ascending_BK.gather(1, middle_B2).mean(dim=1)
    mismatches_B = own_BK.shape[1] - agreeing_B
    return [
        ChunkResult(mismatches, mean, median)
        for mismatches, mean, median in zip(mismatches_B.tolist(), mean_B.tolist(), median_B.tolist(), strict=True)
    ]
