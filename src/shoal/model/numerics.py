"""Exact or fast: whether a token's results have the same bits wherever and beside whatever they are computed.

    exact   a token's hidden state, logits and logprob depend on its own prefix and the weights alone: attention of a fixed
            order (`exact`), rows padded to multiples of ROW_UNIT. Machines that compute alike agree to the last bit.
    fast    whichever kernels are fastest (`attention`); results differ by rounding with batch and packing.

Exactness rests on matrix products that give a row the same bits beside any number of others. Whether this machine's do is
measured: `refusal`.
Invariant: a model keeps the numerics it was loaded with. Called by `load`, `tree`, the roles, and the engine.
Left out: devices other than the CPU. A GPU needs batch-invariant products and attention.
"""

from typing import Any, Literal

Numerics = Literal["exact", "fast"]

EXACT = "shoal_exact"  # the name of exact attention in transformers
ROW_UNIT = 16  # products of other counts of rows may take other kernels: float32 does below 8


def of(model: Any) -> Numerics:
    """What the model was loaded with."""
    return "exact" if model.config._attn_implementation == EXACT else "fast"
