"""Low-rank adapters (LoRA, arXiv 2106.09685): y = W x + scale * B (A x), with W frozen and A, B trained.

A version of a model with adapters holds W, A and B. Learner, engine and validator compute with this module, so they compute
the same policy. Adapters are not merged into bf16 weights, because small updates would be rounded away.

    names    A and B of layer `l` are `l.lora_A` and `l.lora_B` beside `l.weight`
    config   `shoal_lora` in config.json: rank, alpha, targets

Invariant: with B = 0, its initial value, the output equals the original layer's bit for bit. With exact numerics, the
bits of an output row depend only on its input row, as with `products.linear`.
Left out: adapters of the embeddings and the output head.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.model import products

FIELD = "shoal_lora"  # a field of the model's config
NAMES = ("lora_A", "lora_B")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Adapters:
    """Which layers have adapters, and their size."""

    rank: int
    alpha: float
    targets: Sequence[str] = TARGETS  # last parts of the layers' names

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Adapted(nn.Linear):
    """A linear layer with its adapter. It shares the weight of the layer that it replaces."""

    def __init__(self, layer: nn.Linear, section: Adapters, *, exact: bool) -> None:
        with torch.device("meta"):
            super().__init__(layer.in_features, layer.out_features, layer.bias is not None)
        self.weight, self.bias = layer.weight, layer.bias
        self.scale, self.exact = section.scale, exact
        device = "cpu" if layer.weight.is_meta else layer.weight.device  # A must have values even if W is loaded later
        self.lora_A = nn.Parameter(layer.weight.new_empty(section.rank, layer.in_features, device=device))
        self.lora_B = nn.Parameter(layer.weight.new_zeros(layer.out_features, section.rank, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, input: Tensor) -> Tensor:
        linear = products.linear if self.exact else F.linear
        x_TK = input.flatten(0, -2)
        own_TN = linear(x_TK, self.weight, self.bias)
        added_TN = linear(linear(x_TK, self.lora_A), self.lora_B)
        return own_TN.add(added_TN, alpha=self.scale).view(*input.shape[:-1], -1)


def attach_(model: Any, section: Adapters, *, exact: bool) -> None:
    """Add adapters that do not change the output yet, and record them in the model's config.

    Keep existing adapters with the same settings. Raise ShoalError if the model has other adapters, or no target layer.
    """
    stored = stored_in(model.config)
    if stored is not None and any(layers(model)):
        if stored != section:
            raise ShoalError(f"the model has adapters already: {stored}, but learner.lora is {section}")
        return
    attached = False
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if name in section.targets and isinstance(layer, nn.Linear):
                setattr(parent, name, Adapted(layer, section, exact=exact).train(layer.training))
                attached = True
    if not attached:
        linear = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
        raise ShoalError(
            f"none of {', '.join(section.targets)} is a linear layer of {type(model).__name__} with {sorted(linear)}: "
            "remove learner.lora to train all weights"
        )
    setattr(model.config, FIELD, asdict(section))


def stored_in(config: Any) -> Adapters | None:
    """Return the adapters that a model's config declares, or None."""
    fields = getattr(config, FIELD, None)
    return Adapters(int(fields["rank"]), float(fields["alpha"]), tuple(fields["targets"])) if fields else None


def layers(model: Any) -> Iterator[tuple[str, Adapted]]:
    """Iterate over the layers that have an adapter, with their names."""
    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, Adapted))


def is_adapter(name: str) -> bool:
    """Return whether a tensor of this name belongs to an adapter."""
    return name.rpartition(".")[2] in NAMES
