"""Exact or fast: whether a token's results have the same bits wherever and beside whatever they are computed.

    exact   a token's hidden state, logits and logprob depend on its own prefix and the weights alone: products and attention
            sum in a fixed order (`products`, `exact`). Machines that compute alike agree to the last bit.
    fast    whichever kernels are fastest (`attention`); results differ by rounding with batch and packing.

Invariant: a model keeps the numerics it was loaded with. Called by `load`, `tree`, the roles, and the engine.
Left out: devices other than the CPU. A GPU needs batch-invariant products and attention.
"""

from typing import Any, Literal

Numerics = Literal["exact", "fast"]

EXACT = "shoal_exact"  # the name of exact attention in transformers
ROW_UNIT = 16  # rows of tokens are padded to multiples of this: elementwise kernels compute what is left over differently


def of(model: Any) -> Numerics:
    """What the model was loaded with."""
    return "exact" if model.config._attn_implementation == EXACT else "fast"
