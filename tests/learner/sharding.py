"""Checks that run on each of several ranks. `tests.learner.process` writes the result of rank R to OUT/R.json."""

from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.learner import masters
from shoal.learner.batch import micro_batches
from shoal.learner.policy import Policy
from shoal.learner.ranks import Ranks, whole
from shoal.model.load import Root
from shoal.model.training import Sharded, local, open_sharded

from .support import N_TOKENS, make_groups, make_policy


def loads(ranks: Ranks, model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Compare a policy loaded in shards with a policy loaded whole and then sharded, before and after two updates."""

    def made() -> tuple[Policy, Tensor]:
        torch.manual_seed(1)
        return make_policy(model, ranks=ranks, **settings), torch.get_rng_state()

    (sharded, state), old = (made(), mock.patch.object(masters, "open_sharded", return_value="the test loads it whole"))
    with old:
        whole_, whole_state = made()
    differ = [] if torch.equal(state, whole_state) else ["random state"]
    differ += _different(sharded, whole_)
    for number in range(2):
        rows = micro_batches(make_groups(), row_tokens=64, normalize_std=False)
        figures = [policy.update(ranks.scatter(rows), N_TOKENS) for policy in (sharded, whole_)]
        differ += [f"figures of update {number}"] if figures[0] != figures[1] else []
    differ += [f"{name} after updates" for name in _different(sharded, whole_)]
    published = list(sharded.published())
    for (name, tensor), own in zip(published, sharded.stored, strict=True):
        wanted = whole(whole_.model.state_dict()[own].detach()).to("cpu", torch.bfloat16)
        if ranks.leads and not (name == own and torch.equal(tensor, wanted) and tensor.dtype == wanted.dtype):
            differ.append(f"published {name}")
    return {
        "sharded": isinstance(sharded.sharded, Sharded),
        "loaded whole": whole_.sharded is None,
        "differ": differ,
        "tied": sharded.model.get_input_embeddings().weight is sharded.model.get_output_embeddings().weight,
        "published elsewhere": sum(tensor.numel() for _, tensor in published) if not ranks.leads else 0,
        "generation": sharded.model.generation_config.to_dict() == whole_.model.generation_config.to_dict(),
    }


def _different(one: Policy, other: Policy) -> list[str]:
    result = []
    for method in ("named_parameters", "named_buffers"):
        pairs = [{name: local(x.detach()) for name, x in getattr(policy.model, method)()} for policy in (one, other)]
        result += [] if pairs[0].keys() == pairs[1].keys() else [method]
        result += [name for name in pairs[0] if not _same(pairs[0][name], pairs[1][name])]
    result += [] if list(one.masters) == list(other.masters) else ["masters"]
    return result + [
        f"master {name}" for name in one.masters if not _same(*(local(p.masters[name]) for p in (one, other)))
    ]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def memory(ranks: Ranks, model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure the bytes read and the peak bytes of tensors while loading in shards, and the whole model's size."""
    with Live() as live:
        result = open_sharded(model, "cpu", "fast", ranks.shard)
        assert isinstance(result, Sharded), result
        compared = live.peak_bytes
        root = Root(result.skeleton())
        ranks.shard(root, torch.float32)
        result.fill_(root)
    parameters = sum(parameter.numel() for parameter in root.parameters())
    return {
        "read_bytes": result.weights.read_bytes,
        "stored_bytes": 4 * parameters,
        "compared_bytes": compared,
        "peak_bytes": live.peak_bytes,
        "whole_bytes": 4 * parameters,
    }


class Live(TorchDispatchMode):
    """Measures the peak bytes of the tensors created within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: WeakSet[Any] = WeakSet()
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # PyTorch calls this method again for the local parts
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self.storages.add(leaf.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, sum({s.data_ptr(): s.nbytes() for s in self.storages}.values()))
        return result


def renamed(ranks: Ranks, model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Report why a model's files must be loaded whole."""
    policy = make_policy(model, ranks=ranks)
    return {"why": open_sharded(model, "cpu", "fast", ranks.shard), "whole": policy.sharded is None}


CHECKS = {"loads": loads, "memory": memory, "renamed": renamed}
