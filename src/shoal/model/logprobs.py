"""Logprobs and entropies of chosen tokens from hidden states, a slice of the vocabulary's logits at a time.

The full logits of a batch (tokens x vocabulary) are the largest tensor of training a small model; here they exist only
for `CHUNK` tokens at a time and are computed again in the backward pass.
Called by the learner.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal.model.sampling import entropy, token_logprobs

CHUNK = 64  # tokens whose logits are in memory together: 13 MB in float32 at a vocabulary of 49,152


def chosen_logprobs(
    model: Any, hidden_NH: Tensor, target_N: Tensor, *, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """logprob of each target under lm_head(hidden) / temperature, and the entropy where asked for. float32, nats."""

    def chunk(hidden_CH: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = model.lm_head(hidden_CH).float() / temperature
        entropy_C = entropy(logits_CV) if with_entropy else logits_CV.new_zeros(len(target_C))
        return token_logprobs(logits_CV, target_C), entropy_C

    parts = []
    for hidden_CH, target_C in zip(torch.split(hidden_NH, CHUNK), torch.split(target_N, CHUNK), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(chunk, hidden_CH, target_C, use_reentrant=False))
        else:
            parts.append(chunk(hidden_CH, target_C))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None
