"""From final hidden states to logits: the output head, its bias, and what some models do to the logits behind it.

    logits = cap * tanh(scale * (hidden W^T + b) / cap)         Gemma 2, Cohere, Granite and others

Invariant: engine, validator and learner take logits from here, so they agree. A plain head's logits are its output,
unchanged; others are float32.
`support` finds scale and cap when a model is loaded, by comparing with transformers. Called by everything that needs logits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

ATTRIBUTE = "shoal_logits"  # of a model, where its logits are changed: (scale, cap)


class Change(NamedTuple):
    """What happens to logits behind the head."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, raw_NV: Tensor) -> Tensor:
        """float32, unless nothing is changed."""
        if self == NOTHING:
            return raw_NV
        scaled_NV = raw_NV.float() * self.scale
        return scaled_NV if self.cap is None else torch.tanh(scaled_NV / self.cap) * self.cap

    def slope(self, changed_NV: Tensor) -> Tensor | float | None:
        """d changed / d raw, from the changed logits; None where it is 1 everywhere."""
        if self.cap is not None:
            return (changed_NV / self.cap).square_().neg_().add_(1.0).mul_(self.scale)
        return None if self.scale == 1.0 else self.scale


NOTHING = Change()


def change_of(model: Any) -> Change:
    return getattr(model, ATTRIBUTE, NOTHING)


def logits(model: Any, hidden_NH: Tensor) -> Tensor:
    """The model's logits of final hidden states, before the temperature. Returns logits_NV."""
    return change_of(model)(model.get_output_embeddings()(hidden_NH))
