"""Weights that change in the engine's own tensors: bit for bit what the new file holds, or nothing at all."""

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.shardcast.fetch.cache import delta_path
from shoal.shardcast.fetch.inplace import advance_

from .support import client, origin, serving

Fetched = tuple[Path, Path]


def weights(version: int) -> dict[str, Tensor]:
    layer_NM = torch.randn(300, 70, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer_NM.view(-1).view(torch.int16)[:: 97 + version] += version  # over the sign and into infinities, too
    return {"layer": layer_NM, "norm": torch.full((70,), 1.0 + version).bfloat16(), "same": torch.ones(5).bfloat16()}


@pytest.fixture
def fetched(tmp_path: Path) -> Fetched:
    """Folders of versions 0 and 1 in one client's cache; 1 came as a delta."""
    return asyncio.run(bring(tmp_path))


async def bring(tmp_path: Path) -> Fetched:
    source = origin(tmp_path, anchor_every=10, shard_size_bytes=4096)
    async with serving(source.store) as url:
        reader = client(tmp_path, url)
        for version in (0, 1):
            folder = tmp_path / f"model{version}"
            folder.mkdir()
            save_file(weights(version), folder / "model.safetensors")
            (folder / "config.json").write_text(f'{{"version": {version}}}')
            source.publish(folder, version)
            await asyncio.to_thread(reader.fetch, version)
        assert reader.progress is not None and reader.progress.parent == 0
        return reader.cache.folder(0), reader.cache.folder(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tensors_of_the_old_version_become_those_of_the_new(fetched: Fetched, dtype: torch.dtype) -> None:
    old, new = fetched
    held = {name: tensor.to(dtype) for name, tensor in load_file(old / "model.safetensors").items()}
    before = {name: tensor.data_ptr() for name, tensor in held.items()}
    assert advance_(held, old, new)
    for name, tensor in load_file(new / "model.safetensors").items():
        assert torch.equal(held[name].view(torch.uint8), tensor.to(dtype).view(torch.uint8)), name
    assert before == {name: tensor.data_ptr() for name, tensor in held.items()}, "in place"


@pytest.mark.parametrize("harm", ["flipped", "gone", "whole", "backwards"])
def test_without_the_right_delta_nothing_is_touched(fetched: Fetched, harm: str) -> None:
    old, new = fetched
    held = load_file(old / "model.safetensors")
    if harm == "flipped":
        data = bytearray(delta_path(new).read_bytes())
        data[-3] ^= 1
        delta_path(new).write_bytes(data)
    elif harm == "gone":
        delta_path(new).unlink()
    elif harm == "whole":
        new = old
    else:
        old, new = new, old
    assert not advance_(held, old, new)
    for name, tensor in weights(0).items():
        assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_tensors_held_in_another_way_are_left_alone(fetched: Fetched) -> None:
    held = load_file(fetched[0] / "model.safetensors")
    fused = held | {"layer": torch.cat([held["layer"], held["layer"]])}
    assert not advance_(fused, *fetched)
    assert not advance_(held | {"layer": held["layer"].half()}, *fetched)
    assert not advance_({name: held[name] for name in ("norm", "same")}, *fetched)
