"""What vLLM's own sampler draws, as JSON on the standard output: its Triton kernel, interpreted on the CPU.

    $SHOAL_VLLM_PYTHON tests/model/vllm_kernel.py <<< '{"rows": [[SEED, POSITION]], "vocabulary": 4096, "temperature": 0.7}'

Its file is loaded without the rest of vLLM, which takes seconds to import and, on a CPU, hides Triton from its kernels.
`test_sampling` compares; its known numbers are what this printed for vLLM 0.32.0.
"""

import importlib.util
import json
import os
import sys
import types
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

vllm = importlib.util.find_spec("vllm")
assert vllm is not None and vllm.submodule_search_locations, "no vLLM here"
path = Path(vllm.submodule_search_locations[0]) / "v1/worker/gpu/sample/gumbel.py"
utils = types.ModuleType("vllm.triton_utils")
utils.tl, utils.triton = tl, triton
sys.modules["vllm.triton_utils"] = utils
spec = importlib.util.spec_from_file_location("gumbel", path)
assert spec is not None and spec.loader is not None
gumbel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gumbel)


@triton.jit
def steps(hashes, uniforms, noise, seeds, positions, size: tl.constexpr):
    """The steps of `gumbel_noised_argmax`, each with vLLM's own function."""
    row, ids = tl.program_id(0), tl.arange(0, size)
    seed, position, place = tl.load(seeds + row), tl.load(positions + row), row * size + ids
    tl.store(hashes + place, gumbel.murmur3_hash32(seed, position, ids).to(tl.int64))
    uniform = gumbel.murmur3_uniform32(seed, position, ids)
    tl.store(uniforms + place, uniform)
    tl.store(noise + place, -tl.log(-gumbel._log1p_neg_stable(uniform)))


asked = json.load(sys.stdin)
rows, size = asked["rows"], asked["vocabulary"]
seeds, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
hashes = torch.zeros(len(rows), size, dtype=torch.int64)
uniforms, noise = torch.zeros(len(rows), size), torch.zeros(len(rows), size)
steps[(len(rows),)](hashes, uniforms, noise, seeds, positions, size)
logits = 3 * torch.randn(len(rows), size, generator=torch.Generator().manual_seed(0))
tokens = gumbel.gumbel_sample(
    logits,
    torch.arange(len(rows)),
    torch.full((len(rows),), asked["temperature"]),
    seeds,
    positions,
    apply_temperature=True,
    is_drafting=False,
)
found = {"hashes": hashes, "uniforms": uniforms.view(torch.int32), "noise": noise.view(torch.int32), "tokens": tokens}
json.dump({name: values.tolist() for name, values in found.items()}, sys.stdout)
