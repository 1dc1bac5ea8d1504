"""Building proofs: the worker's side.

Invariant: a proof's polynomial passes through (index mod modulus, raw 16 bits) of every one of its chunk's
top_k entries.
Called by rollout workers with the final hidden states (after the last norm, before the output head) of
generated tokens. The arithmetic runs where the hidden states are; only the finished coefficients are copied.

The public package takes a list of activations: the prompt's, which gets a proof of its own, then one per decoded
token. The same proofs come from all of them concatenated and prefill_tokens the length of the prompt; with its
skip_prefill, from the decoded tokens alone and prefill_tokens 0. Shoal's roles use the latter.

Paper: TOPLOC section 3.
"""

from collections.abc import Sequence

from torch import Tensor

from shoal.toploc.chunk import peaks
from shoal.toploc.field import PRIME, interpolate
from shoal.toploc.proof import injective_modulus, serialise


def build(hidden_TH: Tensor, *, chunk_tokens: int = 32, top_k: int = 128, prefill_tokens: int = 0) -> list[bytes]:
    """One proof of 2 + 2 * top_k bytes for the first `prefill_tokens` tokens together, if there are any, then
    one per `chunk_tokens` tokens, the last for what remains.

    float32 is rounded to bfloat16; the bytes do not say which dtype, so the verifier must use the same.
    Choose top_k at most H, or a last chunk of one token cannot be proven (ProofError). ValueError for tensors
    that are not finite, not 2-D or of another dtype, and for prefill_tokens outside 0..T.
    """
    return build_many([hidden_TH], chunk_tokens=chunk_tokens, top_k=top_k, prefill_tokens=prefill_tokens)[0]


def build_many(
    hiddens: Sequence[Tensor],
    *,
    chunk_tokens: int = 32,
    top_k: int = 128,
    prefill_tokens: int | Sequence[int] = 0,
) -> list[list[bytes]]:
    """`build` for each sequence, the arithmetic done for all their chunks at once; one list per sequence.

    prefill_tokens holds for all sequences, or lists one number for each.
    """
    found = peaks(hiddens, chunk_tokens=chunk_tokens, top_k=top_k, prefill_tokens=prefill_tokens)
    modulus_B = injective_modulus(found.index_BK)
    coefficients_BK = interpolate(found.index_BK % modulus_B[:, None], found.bits_BK % PRIME)
    proofs = iter(serialise(modulus_B, coefficients_BK))
    return [[next(proofs) for _ in range(count)] for count in found.chunks_per_sequence]
