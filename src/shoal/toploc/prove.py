"""Build and verify proofs.

Invariants: a proof's polynomial passes through (index mod modulus, raw 16 bits) for each top_k entry of its chunk.
`verify` returns one ChunkResult per chunk of the verifier's own hidden states, never fewer. A malformed, missing or extra
proof raises ProofError.
The hidden states are those of generated tokens, after the last norm and before the output head. The arithmetic runs on their
device; only the coefficients are copied. The indices are not compared separately. At an index that only the verifier
selected, the polynomial's value is random, which counts as a mismatch. `shoal calibrate` calibrates thresholds.

The public package takes a list of activations: one tensor for the prompt, which gets a proof of its own, then one
tensor per decoded token. Here the prompt's proof is `build(prompt_TH, chunk_tokens=T)`. Shoal's workers make no proof
of the prompt, which is what the package does with skip_prefill. Given one tensor, the package's verifier reports the
same figures as this one, except for the median (see ChunkResult). Given a list of activations, the package's verifier
ignores the modulus, so it rejects every honest proof whose modulus is not 65497, even a proof that the package made.

Paper: TOPLOC sections 3 (proofs) and 4 (error metrics and thresholds).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from shoal.evidence import within
from shoal.toploc.chunk import peaks
from shoal.toploc.field import PRIME, evaluate, interpolate
from shoal.toploc.proof import ProofError, injective_modulus, parse, serialise

# The leading coefficients of an interpolant of real data are uniform, so all eight are zero with probability 65497^-8.
# In a forged polynomial of low degree, such as a constant, all eight are zero. If they are, the whole proof counts as a
# mismatch unless every value of the polynomial equals the verifier's exactly.
_LEADING = 8


@dataclass(frozen=True)
class ChunkResult:
    """Differences between the verifier's top_k entries of a chunk and the proof's values there.

    exponent_mismatches: number of entries whose exponent bits differ, 0..top_k.
    mantissa_error_mean, mantissa_error_median: mean and median, over the entries with equal exponents, of the absolute
    difference of the mantissa bits as integers (units in the last place); infinity if no exponents are equal. The sign
    bit is ignored. The median of an even number of entries is the mean of the middle two. (The public package takes the
    upper of the two if it is given a tensor.)
    """

    exponent_mismatches: int
    mantissa_error_mean: float
    mantissa_error_median: float


@dataclass(frozen=True)
class Thresholds:
    """The largest errors that are accepted."""

    exponent_mismatches: float
    mantissa_error_mean: float
    mantissa_error_median: float

    def passes(self, result: ChunkResult) -> bool:
        """Return whether every figure is finite, not negative, and within its limit."""
        return all(within(getattr(result, name), limit) for name, limit in vars(self).items())


BFLOAT16 = Thresholds(exponent_mismatches=38, mantissa_error_mean=10, mantissa_error_median=8)
"""For bfloat16 at top_k 128 (TOPLOC section 4).

The following was measured with SmolLM2-135M on 32 chunks of two texts. Errors are given as exponents / mean / median.
If a worker decodes and a validator prefills, each in bfloat16, float16 or float32, the errors are at most 6 / 2.1 / 2.
With weights rounded to 4 bits the errors are at least 19 / 12.4 / 6, and every chunk fails. With weights rounded to 8
bits they are at most 8 / 3.9 / 2, and every chunk passes.

The looser thresholds 60 / 40 / 40, which others use, accept a constant polynomial, which needs no hidden states. Most
of a chunk's top_k entries lie in one or two binades, so a constant in the right binade has the right exponent for more
than half of them. Random 7-bit mantissas differ by about 40. One constant passes in 15 of 16 real chunks
(tests/toploc/test_verify.py). The thresholds here accept no constant on heavy-tailed hidden states. On Gaussian hidden
states the 128 largest values are so close together that a well-chosen constant can pass. Therefore `verify` itself
rejects constants, by their degree.
"""


def build(hidden_TH: Tensor, *, chunk_tokens: int = 32, top_k: int = 128) -> list[bytes]:
    """Return one proof of 2 + 2 * top_k bytes per `chunk_tokens` tokens. The last chunk may be shorter.

    float32 is rounded to bfloat16. The bytes do not contain the dtype, so the verifier must use the same dtype. Raise
    ProofError if there are no tokens, or if a chunk has fewer than top_k values, which cannot happen if top_k is at
    most H. Raise ValueError for tensors that are not finite, not 2-D or of a dtype other than bfloat16, float16 and
    float32.
    """
    return build_many([hidden_TH], chunk_tokens=chunk_tokens, top_k=top_k)[0]


def build_many(hiddens: Sequence[Tensor], *, chunk_tokens: int = 32, top_k: int = 128) -> list[list[bytes]]:
    """Run `build` on each sequence, with the arithmetic of all chunks batched. Return one list per sequence."""
    own = peaks(hiddens, chunk_tokens=chunk_tokens, top_k=top_k)
    modulus_B = injective_modulus(own.index_BK)
    coefficients_BK = interpolate(own.index_BK % modulus_B[:, None], own.bits_BK % PRIME)
    proofs = iter(serialise(modulus_B, coefficients_BK))
    return [[next(proofs) for _ in range(count)] for count in own.chunks_per_sequence]


def verify(
    hidden_TH: Tensor,
    proofs: Sequence[bytes],
    *,
    chunk_tokens: int = 32,
    top_k: int = 128,
) -> list[ChunkResult]:
    """Compare one sequence's proofs with the verifier's own hidden states of the same tokens.

    `chunk_tokens`, `top_k` and the dtype (float32 counts as bfloat16) must be the prover's.
    Raise ProofError if a proof is malformed or the number of proofs is wrong. Raise ValueError if `hidden_TH` is invalid,
    which is not evidence against the prover.
    """
    (results,) = verify_many([hidden_TH], [proofs], chunk_tokens=chunk_tokens, top_k=top_k)
    return results


def verify_many(
    hiddens: Sequence[Tensor],
    proofs: Sequence[Sequence[bytes]],
    *,
    chunk_tokens: int = 32,
    top_k: int = 128,
) -> list[list[ChunkResult]]:
    """Run `verify` on each sequence, with the arithmetic of all chunks batched on the device of the hidden states.

    The first malformed proof raises ProofError for the whole call. A caller that verifies several provers can drop the
    sequence whose index is `ProofError.sequence` and call again.
    """
    if len(hiddens) != len(proofs):
        raise ValueError(f"{len(hiddens)} sequences but proofs for {len(proofs)}")
    own = peaks(hiddens, chunk_tokens=chunk_tokens, top_k=top_k)
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
    """Return the errors of each row of raw 16-bit values. In a row marked in `forged_B`, every entry is a mismatch."""
    exponent_own_BK = (own_BK & 0x7FFF) >> mantissa_bits
    exponent_proven_BK = (proven_BK & 0x7FFF) >> mantissa_bits
    mantissa_mask = (1 << mantissa_bits) - 1
    agree_BK = (exponent_own_BK == exponent_proven_BK) & ~forged_B[:, None]
    error_BK = ((own_BK & mantissa_mask) - (proven_BK & mantissa_mask)).abs().double()

    agreeing_B = agree_BK.sum(dim=1)
    mean_B = error_BK.where(agree_BK, 0.0).sum(dim=1) / agreeing_B.clamp(min=1)
    mean_B[agreeing_B == 0] = inf
    # The errors of entries with unequal exponents become infinite and sort last. If all
    # exponents are unequal, the median is infinite too.
    ascending_BK = error_BK.where(agree_BK, inf).sort(dim=1).values
    middle_B2 = torch.stack([(agreeing_B - 1).clamp(min=0) // 2, agreeing_B // 2], dim=1)
    median_B = ascending_BK.gather(1, middle_B2).mean(dim=1)
    mismatches_B = own_BK.shape[1] - agreeing_B
    return [
        ChunkResult(mismatches, mean, median)
        for mismatches, mean, median in zip(mismatches_B.tolist(), mean_B.tolist(), median_B.tolist(), strict=True)
    ]
