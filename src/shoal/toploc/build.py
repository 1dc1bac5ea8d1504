"""Building proofs: the worker's side.

Invariant: a proof's polynomial passes through (index mod modulus, raw 16 bits) of every one of its chunk's
top_k entries.
Called by rollout workers with the final hidden states (after the last norm, before the output head) of generated
tokens. The arithmetic runs on the device of the hidden states; only the coefficients are copied.

The public package takes a list of activations: the prompt's, which get their own proof, then one per decoded token. To
get the same proofs here, concatenate them and pass the prompt's length as prefill_tokens. For its skip_prefill, pass
only the decoded tokens and prefill_tokens 0, as Shoal's roles do.

Paper: TOPLOC section 3.
"""

from collections.abc import Sequence

from torch import Tensor

from shoal.toploc.chunk import peaks
from shoal.toploc.field import PRIME, interpolate
from shoal.toploc.proof import injective_modulus, serialise


def build(hidden_TH: Tensor, *, chunk_tokens: int = 32, top_k: int = 128, prefill_tokens: int = 0) -> list[bytes]:
    """One proof of 2 + 2 * top_k bytes for the first `prefill_tokens` tokens together, if any, then one per
    `chunk_tokens` tokens. The last chunk may be shorter.

    float32 is rounded to bfloat16. The bytes do not hold the dtype, so the verifier must use the same one. top_k must be
    at most H, or a last chunk of one token cannot be proven (ProofError). Raises ValueError for tensors that are not
    finite, not 2-D or of another dtype, and for prefill_tokens outside 0..T.
    """
    return build_many([hidden_TH], chunk_tokens=chunk_tokens, top_k=top_k, prefill_tokens=prefill_tokens)[0]


def build_many(
    hiddens: Sequence[Tensor],
    *,
    chunk_tokens: int = 32,
    top_k: int = 128,
    prefill_tokens: int | Sequence[int] = 0,
) -> list[list[bytes]]:
    """`build` for each sequence, with the arithmetic of all chunks batched. Returns one list per sequence.

    prefill_tokens is one number for all sequences, or a list with one number for each.
    """
    found = peaks(hiddens, chunk_tokens=chunk_tokens, top_k=top_k, prefill_tokens=prefill_tokens)
    modulus_B = injective_modulus(found.index_BK)
    coefficients_BK = interpolate(found.index_BK % modulus_B[:, None], found.bits_BK % PRIME)
    proofs = iter(serialise(modulus_B, coefficients_BK))
    return [[next(proofs) for _ in range(count)] for count in found.chunks_per_sequence]
