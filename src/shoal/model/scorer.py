"""Logprobs of packed completions under a causal language model, as one module that can be sharded and compiled.

Invariant: a forward uses the model's weights only inside this module's `forward`, as FSDP requires.
Called by the learner. The validator needs hidden states and calls `tree.forward_hidden` instead.
"""

from typing import Any

from torch import Tensor, nn

from shoal.model import numerics
from shoal.model.head import change_of
from shoal.model.logprobs import LossOf, chosen_logprobs, chosen_loss
from shoal.model.tree import Pack, forward_hidden


class Scorer(nn.Module):
    def __init__(self, model: Any, *, keep_logits: bool = False) -> None:
        super().__init__()
        self.model = model
        self.keep_logits = keep_logits

    def forward(
        self, packed: Pack, temperature: float, with_entropy: bool, loss_of: LossOf | None = None
    ) -> tuple[Tensor, Tensor | None] | Tensor:
        """(logp_N, entropy_N or None) of the pack's targets, in their order; float32, nats.

        With `loss_of`, its sum over slices of the targets instead: a scalar (`logprobs.chosen_loss`).
        """
        hidden_NH = forward_hidden(self.model, packed)
        layer = self.model.get_output_embeddings()
        settings: dict[str, Any] = {
            "temperature": temperature,
            "with_entropy": with_entropy,
            "exact": numerics.of(self.model) == "exact",
            "bias_V": getattr(layer, "bias", None),
            "change": change_of(self.model),
        }
        if loss_of is not None:
            return chosen_loss(hidden_NH, layer.weight, packed.target_N, loss_of, **settings)
        return chosen_logprobs(hidden_NH, layer.weight, packed.target_N, keep_logits=self.keep_logits, **settings)

    @property
    def layers(self) -> list[nn.Module]:
        return blocks(self.model)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The decoder's blocks: the unit of sharding, compilation and recomputation."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


def recompute_activations(scorer: Scorer) -> None:
    """Keep only each block's input for the backward pass and recompute the rest."""
    scorer.model.activation_checkpointing_enable({"use_reentrant": False})
    scorer.model.train()  # transformers recomputes only in training mode
    for module in scorer.model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()  # the trained policy must equal the one that samples


def compile_blocks(scorer: Scorer) -> None:
    """Compile each block for rows of any length. All blocks share one compilation."""
    for layer in scorer.layers:
        layer.compile(dynamic=True)
