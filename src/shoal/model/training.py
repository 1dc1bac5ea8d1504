"""The learner's side of a model: scoring packed completions, and loading the model in shards.

A forward pass uses the model's weights only inside `Scorer.forward`, as FSDP requires. Activations can be recomputed.
When a model is loaded in shards, no rank ever holds all of the weights, or reads more than its own part of the files:

    1. build the model on the meta device, without weights; buffers such as rotary tables are computed, not read
    2. shard it: each parameter gets its shape on this rank, still without memory
    3. allocate the shards, and read this rank's rows of each tensor from the safetensors files

The model is loaded twice: in float32 to compare it with plain transformers (`support.check_logprobs_`), then for training.
Invariant: weights, buffers and random state are the same as after loading the whole model and then sharding it.
Left out: files that name tensors differently from transformers (stacked experts). For these, `Weights.why_not` returns the
reason, and every rank loads the whole model.
"""

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shoal.model import logprobs, numerics
from shoal.model.load import (
    INDEX,
    WEIGHTS,
    Root,
    build_model,
    check_size,
    check_weights,
    generation_config,
    load_config,
    open_for_each,
    random_model,
    tied_names,
)
from shoal.model.logprobs import LossOf, Scoring, change_of, chosen_logprobs, chosen_loss
from shoal.model.numerics import Numerics
from shoal.model.support import check_config, check_logprobs_
from shoal.model.tree import Pack, forward_hidden

Shard_ = Callable[[nn.Module, torch.dtype], None]  # shards a module's `model`; its weights are gathered in this dtype


class Scorer(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, packed: Pack, temperature: float, with_entropy: bool, loss_of: LossOf | None = None
    ) -> tuple[Tensor, Tensor | None] | Tensor:
        """Return (logp_N, entropy_N or None) of the pack's targets, in their order; float32, nats.

        With `loss_of`, return its sum over slices of the targets instead (`logprobs.chosen_loss`), a scalar.
        """
        hidden_NH = forward_hidden(self.model, packed)
        layer = self.model.get_output_embeddings()
        exact, bias_V = numerics.of(self.model) == "exact", getattr(layer, "bias", None)
        how = Scoring(temperature, with_entropy, exact, change_of(self.model))
        if loss_of is not None:
            return chosen_loss(hidden_NH, layer.weight, packed.target_N, loss_of, how, bias_V)
        return chosen_logprobs(hidden_NH, layer.weight, packed.target_N, how, bias_V)


def recompute_activations(scorer: Scorer) -> None:
    """Keep only each block's input for the backward pass and recompute the rest."""
    scorer.model.activation_checkpointing_enable({"use_reentrant": False})
    scorer.model.train()  # transformers recomputes only in training mode
    for module in scorer.model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()  # the trained policy must equal the sampling policy


class Weights:
    """The tensors in a folder's safetensors files, read by rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read_bytes = 0  # bytes of tensor data read so far
        if (folder / INDEX).exists():
            self.files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        else:
            with safe_open(folder / WEIGHTS, framework="pt") as file:
                self.files = dict.fromkeys(file.keys(), WEIGHTS)

    def why_not(self, model: Any) -> str:
        """Return why `model` cannot be read by rows; "" if it can."""
        if differ := sorted((set(model.state_dict()) - tied_names(model)) ^ set(self.files)):
            return f"its files name tensors differently from transformers ({differ[0]})"
        return ""

    @torch.no_grad()
    def fill_(self, model: Any) -> None:
        """Read this rank's rows of all stored tensors. Raise ValueError if a shape differs."""
        own: dict[str, Any] = model.state_dict()
        stored = sorted(set(own) & set(self.files), key=lambda name: (self.files[name], name))
        for path, names in groupby(stored, self.files.__getitem__):
            for name, file in open_for_each(self.folder / path, list(names)):
                piece, into = file.get_slice(name), own[name]
                if tuple(piece.get_shape()) != tuple(into.shape):
                    raise ValueError(f"{self.folder}: {name} is {piece.get_shape()}, not {tuple(into.shape)}")
                if local(into).numel():  # a rank may have no row of a small tensor
                    rows = piece[own_rows(into)] if isinstance(into, DTensor) else file.get_tensor(name)
                    self.read_bytes += rows.numel() * rows.element_size()
                    local(into).copy_(rows)


@dataclass(frozen=True)
class Sharded:
    """A folder's weights and how to compute its model. `open_sharded` creates it, after a comparison with transformers."""

    folder: Path
    device: torch.device
    weights: Weights
    numerics: Numerics
    change: logprobs.LogitChange

    def skeleton(self) -> Any:
        """Return the model on the meta device, complete except for its weights."""
        model = skeleton(self.folder, load_config(self.folder), self.numerics)
        setattr(model, logprobs.ATTRIBUTE, self.change)
        return model

    def fill_(self, root: nn.Module) -> None:
        """Load the weights of the sharded skeleton in `root.model`."""
        allocate_(root, self.device)
        self.weights.fill_(root.model)


def open_sharded(folder: Path, device: str, numerics: Numerics, shard: Shard_) -> Sharded | str:
    """Return a loader that loads the folder's model in shards, or the reason why there is none. All ranks must call it.

    Raise UnsupportedModelError, as `load_model` does.
    """
    config = load_config(folder)
    check_config(config, folder)
    check_size(config, check_weights(folder), folder)
    weights = Weights(folder)
    with torch.random.fork_rng():
        model = skeleton(folder, config, numerics)
        if why := weights.why_not(model):
            return why
        root = Root(model)
        shard(root, torch.float32)
        allocate_(root, torch.device(device))
        weights.fill_(model)
        root(lambda model: check_logprobs_(model, folder))
    sharded = Sharded(folder, torch.device(device), weights, numerics, logprobs.change_of(model))
    del root
    del model
    gc.collect()  # FSDP's hooks form reference cycles, which would keep the shards in memory
    return sharded


def skeleton(folder: Path, config: Any, numerics: Numerics) -> Any:
    """Build the model in eval mode without weights: parameters are on the meta device, buffers and adapters are real."""

    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    def build(name: str) -> Any:
        with torch.random.fork_rng(), init_empty_weights(include_buffers=False):
            model = random_model(config, name)
        model.tie_weights()
        model.generation_config = generation_config(folder)
        return model

    return build_model(build, config, numerics)


@torch.no_grad()
def allocate_(root: nn.Module, device: torch.device) -> None:
    """Allocate memory for the parameters on the meta device. Other parameters and buffers keep their values."""
    buffers = dict(root.named_buffers())
    real = {name: local(parameter) for name, parameter in root.named_parameters() if not local(parameter).is_meta}

    root._apply(lambda tensor: torch.empty_like(tensor, device=device))  # type: ignore[no-untyped-call]
    for name, buffer in root.named_buffers():
        buffer.copy_(buffers[name])
    for name, parameter in root.named_parameters():
        if name in real:
            local(parameter).copy_(real[name])


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_rows(tensor: DTensor) -> int:
    """Return how many rows of a sharded tensor each rank has; the last ranks may have fewer."""
    assert tensor.placements == (Shard(0),), tensor.placements
    return -(-len(tensor) // tensor.device_mesh.size())


def own_rows(tensor: DTensor) -> slice:
    """Return the rows of a sharded tensor that this rank has."""
    rows = shard_rows(tensor)
    first = min(len(tensor), rows * tensor.device_mesh.get_local_rank())
    return slice(first, first + len(tensor.to_local()))
