"""A model as the learner trains it: the scorer of packed completions, and loading in shards.

A forward uses the model's weights only inside of `Scorer.forward`, as FSDP requires; it can recompute its activations. In
shards no rank ever holds all of the weights, or reads more of the files than its own part of them:

    1. build the model on the meta device, without weights; buffers such as rotary tables are computed, not read
    2. shard it: each parameter gets its shape on this rank, still without memory
    3. allocate the shards, and read this rank's rows of each tensor from the safetensors files

First the model is loaded so in float32 and compared with plain transformers (`support.compare_`), block by block gathered,
like any model; then again to be trained. Each load reads 1/N of the files on each of N ranks.
Invariant: the same weights, buffers and random state as after a whole load that is sharded then.
Left out: files whose tensors are not named as transformers names them (experts that
it stacks, quantised weights): `Weights.why_not` says so, and they are loaded whole on every rank.
"""

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, GenerationConfig

from shoal.model import logprobs, numerics
from shoal.model.load import OPENED_FOR, WEIGHTS, Root, load_config, prepared_, tied_names
from shoal.model.logprobs import LossOf, change_of, chosen_logprobs, chosen_loss
from shoal.model.numerics import Numerics
from shoal.model.support import check_config, compare_
from shoal.model.tree import Pack, forward_hidden

INDEX = f"{WEIGHTS}.index.json"

Shard_ = Callable[[nn.Module, torch.dtype], None]  # shards a module's `model`, to be gathered in this dtype


class Scorer(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

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
        return chosen_logprobs(hidden_NH, layer.weight, packed.target_N, **settings)

    @property
    def layers(self) -> list[nn.Module]:
        return blocks(self.model)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The decoder's blocks: the unit of sharding and recomputation."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


def recompute_activations(scorer: Scorer) -> None:
    """Keep only each block's input for the backward pass and recompute the rest."""
    scorer.model.activation_checkpointing_enable({"use_reentrant": False})
    scorer.model.train()  # transformers recomputes only in training mode
    for module in scorer.model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()  # the trained policy must equal the one that samples


class Weights:
    """The tensors in a folder's safetensors files, read by rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read_bytes = 0  # so far, of tensors
        if (folder / INDEX).exists():
            self.files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        else:
            with safe_open(folder / WEIGHTS, framework="pt") as file:
                self.files = dict.fromkeys(file.keys(), WEIGHTS)

    def why_not(self, model: Any) -> str:
        """Why `model` cannot be read by rows; empty if it can."""
        if getattr(model.config, "quantization_config", None) is not None:
            return "its weights are quantised"
        if differ := sorted((set(model.state_dict()) - tied_names(model)) ^ set(self.files)):
            return f"its files name tensors differently from transformers ({differ[0]})"
        return ""

    @torch.no_grad()
    def fill_(self, model: Any) -> None:
        """Read this rank's rows of every tensor that is stored. Raise ValueError for one of another shape."""
        own: dict[str, Any] = model.state_dict()
        for names in self._together(sorted(set(own) & set(self.files), key=lambda name: (self.files[name], name))):
            with safe_open(self.folder / self.files[names[0]], framework="pt") as file:
                for name in names:
                    piece, into = file.get_slice(name), own[name]
                    if tuple(piece.get_shape()) != tuple(into.shape):
                        raise ValueError(f"{self.folder}: {name} is {piece.get_shape()}, not {tuple(into.shape)}")
                    if local(into).numel():  # a rank may have no row of a small tensor
                        rows = piece[own_rows(into)] if isinstance(into, DTensor) else file.get_tensor(name)
                        self.read_bytes += rows.numel() * rows.element_size()
                        local(into).copy_(rows)

    def _together(self, names: list[str]) -> Iterator[list[str]]:
        """A few names of one file at a time: what was read of a mapped file counts as memory until it is closed."""
        group: list[str] = []
        for name in names:
            if group and (len(group) == OPENED_FOR or self.files[name] != self.files[group[0]]):
                yield group
                group = []
            group.append(name)
        if group:
            yield group


@dataclass(frozen=True)
class Sharded:
    """How a folder's model is to be computed, found out once, and its weights. Made by `opened`."""

    folder: Path
    device: torch.device
    weights: Weights
    numerics: Numerics
    change: logprobs.LogitChange

    def skeleton(self) -> Any:
        """The model on the meta device, ready but for its weights."""
        model = skeleton(self.folder, load_config(self.folder), self.numerics)
        setattr(model, logprobs.ATTRIBUTE, self.change)
        return model

    def fill_(self, root: nn.Module) -> None:
        """Give the sharded skeleton in `root.model` its weights."""
        allocate_(root, self.device)
        self.weights.fill_(root.model)


def opened(folder: Path, device: str, numerics: Numerics, shard: Shard_) -> Sharded | str:
    """How to load the folder's model in shards, or why it cannot be. All ranks must call it.

    Raise UnsupportedModelError, as `load_model` does.
    """
    config = load_config(folder)
    check_config(config, folder)
    weights = Weights(folder)
    with torch.random.fork_rng():
        model = skeleton(folder, config, numerics)
        if why := weights.why_not(model):
            return why
        root = Root(model)
        shard(root, torch.float32)
        allocate_(root, torch.device(device))
        weights.fill_(model)
        root(lambda model: compare_(model, folder))
    sharded = Sharded(folder, torch.device(device), weights, numerics, logprobs.change_of(model))
    del root
    del model
    gc.collect()  # FSDP's hooks are in cycles, which would keep the shards
    return sharded


def skeleton(folder: Path, config: Any, numerics: Numerics) -> Any:
    """The model in eval mode without weights: parameters on the meta device, buffers and adapters real."""

    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    def build(name: str) -> Any:
        with torch.random.fork_rng(), init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=name)
        model.tie_weights()
        if (folder / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        return model

    return prepared_(build, config, numerics)


@torch.no_grad()
def allocate_(root: nn.Module, device: torch.device) -> None:
    """Allocate memory for the parameters that have none. What is real keeps its values."""
    buffers = dict(root.named_buffers())
    drawn = {name: local(one) for name, one in root.named_parameters() if not local(one).is_meta}

    root._apply(lambda one: torch.empty_like(one, device=device))  # type: ignore[no-untyped-call]
    for name, buffer in root.named_buffers():
        buffer.copy_(buffers[name])
    for name, parameter in root.named_parameters():
        if name in drawn:
            local(parameter).copy_(drawn[name])


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_rows(tensor: DTensor) -> int:
    """How many rows of a sharded tensor each rank has, except for the last ones, which may have fewer."""
    assert tensor.placements == (Shard(0),), tensor.placements
    return -(-len(tensor) // tensor.device_mesh.size())


def own_rows(tensor: DTensor) -> slice:
    """Which rows of a sharded tensor this rank has."""
    rows = shard_rows(tensor)
    first = min(len(tensor), rows * tensor.device_mesh.get_local_rank())
    return slice(first, first + len(tensor.to_local()))
