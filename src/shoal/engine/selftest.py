"""Test whether this machine computes a token with the same bits in every batch, by a quick sweep over shapes.

The same completions are decoded together, alone, and beside a prompt with the same prefix, on one thread, on three and on
all threads. Then they are prefilled in several packings. Every hidden state, logit and logprob must have the same bits. A
machine that passes may claim an exactness class (`fingerprint`). Results are cached on disk.

A fingerprint is the digest of a model's hidden states and logits for fixed inputs: a packed tree whose branches cross the
borders of attention's tiles. Machines with equal fingerprints are taken to compute the same bits.

Invariants: on a machine that passed the self-test, a fingerprint depends on weights, dtype and arithmetic alone; not on
time, thread count or the process's other computations. A cached result is valid for one model config, dtype, device, CPU,
library versions and code of this package. Left out: a proof for all shapes (the property tests try many more), and a proof
that the node computed the fingerprint that it reports (docs/trust.md: a false fingerprint gains nothing).
"""

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from shoal import engine as engine_room
from shoal import model as model_room
from shoal.engine.protocol import Completion, Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.files import read_json, write_file
from shoal.model import numerics
from shoal.model.dtype import DtypeName, use_threads
from shoal.model.logprobs import logits, token_logprobs
from shoal.model.products import OrderError
from shoal.model.sources import cache_dir
from shoal.model.tree import Tree, forward_hidden, pack

PROMPTS = (3, 61, 250)  # lengths in tokens; with completions, the prompts cross the borders of attention's tiles
COMPLETIONS, TOKENS = 2, 8
ALONE = 1  # the prompt whose completions are also decoded without the others
SHARING, SHARED = slice(1, 3), 40  # prompts that share a prefix, and the prefix's length in tokens
SETTINGS = ("ATEN_", "DNNL_", "MKL_", "ONEDNN_", "OMP_")  # prefixes of environment variables that change kernels
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # thread counts, on which results must not depend
UNEVEN = 3  # a number of threads that does not divide the size of most tensors
CODE = [Path(room.__path__[0]) for room in (model_room, engine_room)]
PROMPT, BRANCHES = 5, (67, 3)  # lengths in tokens, in the fingerprint's tree; attention's tiles are powers of two


def passes(model: Any, dtype: DtypeName, device: str) -> bool:
    """Return whether no shape of the sweep changes a bit. Use a cached result if there is one.

    A lock lets only one process test at a time. The others wait for its result; if it dies, another process tests.
    """
    path = cache_dir() / "selftests" / f"{_conditions(model, dtype, device)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            try:
                differences = disagreements(model, dtype, device)
            except OrderError as error:  # on a number of threads that this process may not use
                differences = [str(error)]
            write_file(path, (json.dumps({"disagreements": differences}) + "\n").encode())
    return not read_json(path)["disagreements"]


@torch.inference_mode()
def disagreements(model: Any, dtype: DtypeName, device: str) -> list[str]:
    """Return one line for each shape whose bits differ from those of decoding everything together."""
    engine = TorchEngine(dtype, device)
    engine.model = model
    vocabulary, differences = vocabulary_of(model), []
    prompts = [fixed_tokens(f"self-test {length}", length, vocabulary) for length in PROMPTS]
    prompts[SHARING] = [[*prompts[ALONE][:SHARED], *prompt[SHARED:]] for prompt in prompts[SHARING]]
    sampling = Sampling(temperature=1.0, max_tokens=TOKENS, eos_ids=())
    seeds = [[17 * group + number for number in range(COMPLETIONS)] for group in range(len(prompts))]
    together = engine.generate(prompts, seeds, sampling)
    flat = [completion for group in together for completion in group]
    for threads in sorted({1, UNEVEN, torch.get_num_threads()}):
        with use_threads(threads):
            if not _equal(together[ALONE], engine.generate([prompts[ALONE]], [seeds[ALONE]], sampling)[0]):
                differences.append(f"decoded alone, {threads} threads")
            both = zip(together[SHARING], engine.generate(prompts[SHARING], seeds[SHARING], sampling), strict=True)
            if not all(_equal(*groups) for groups in both):
                differences.append(f"decoded behind a shared prefix, {threads} threads")
            for name, rows in _packings(prompts, together).items():
                hidden_NH = torch.cat([forward_hidden(model, pack(trees).to(model.device)) for trees in rows])
                if not _same_states(model, hidden_NH, flat):
                    differences.append(f"prefilled, {name}, {threads} threads")
    return differences


def _packings(prompts: Sequence[list[int]], groups: Sequence[Sequence[Completion]]) -> dict[str, list[list[Tree]]]:
    """Return several ways to pack the trees into rows, by name. Each keeps the completions in order."""
    trees = [
        Tree(prompt, [completion.tokens for completion in group]) for prompt, group in zip(prompts, groups, strict=True)
    ]
    branches = [Tree(tree.prompt, [completion]) for tree in trees for completion in tree.completions]
    shared = [trees[: SHARING.start], trees[SHARING]]
    return {"in one row": [trees], "behind a shared prefix": shared, "one by one": [[branch] for branch in branches]}


def _same_states(model: Any, hidden_NH: Tensor, completions: Sequence[Completion]) -> bool:
    """Return whether states and logprobs, computed in one matrix product or in several, equal the engine's."""
    decoded_NH = torch.cat([completion.hidden_TH for completion in completions])
    if not torch.equal(hidden_NH.to("cpu", torch.bfloat16), decoded_NH):
        return False
    tokens_N = torch.tensor([token for completion in completions for token in completion.tokens]).to(hidden_NH.device)
    decoded_N = torch.tensor([logprob for completion in completions for logprob in completion.logprobs])
    for step in (len(tokens_N), 16):
        parts = [
            token_logprobs(logits(model, hidden_NH[start : start + step]), tokens_N[start : start + step])
            for start in range(0, len(tokens_N), step)
        ]
        if not torch.equal(torch.cat(parts).cpu(), decoded_N):
            return False
    return True


def _equal(group: Sequence[Completion], other: Sequence[Completion]) -> bool:
    return all(
        a.tokens == b.tokens and a.logprobs == b.logprobs and torch.equal(a.hidden_TH, b.hidden_TH)
        for a, b in zip(group, other, strict=True)
    )


def _conditions(model: Any, dtype: DtypeName, device: str) -> str:
    """Return the digest of everything that the self-test's result may depend on."""
    config: dict[str, Any] = json.loads(
        model.config.to_json_string(use_diff=False),
        object_hook=lambda fields: {
            name: value for name, value in fields.items() if not name.startswith("_")
        },  # no paths
    )
    conditions = {
        "config": config,
        "dtype": dtype,
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else _cpu(),
        "libraries": [torch.__version__, transformers.__version__],
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(SETTINGS) and name not in THREADS
        },
        "code": [
            hashlib.sha256(path.read_bytes()).hexdigest() for folder in CODE for path in sorted(folder.glob("*.py"))
        ],
    }
    return hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()


def _cpu() -> list[str]:
    """Return the names and instruction sets of this machine's cores."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else [platform.platform(), platform.processor()]
    return sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))} or set(lines))


# --- fingerprints ------------------------------------------------------------------------------------------------------


def fixed_tokens(name: str, length: int, vocabulary: int) -> list[int]:
    """Derive token ids from a name, the same on every machine."""
    digests = (hashlib.sha256(f"shoal/tokens\n{name}\n{number}".encode()).digest() for number in range(length))
    return [int.from_bytes(digest[:8], "big") % vocabulary for digest in digests]


def vocabulary_of(model: Any) -> int:
    size: int = model.config.get_text_config(decoder=True).vocab_size
    return size


@torch.inference_mode()
def fingerprint(model: Any) -> str:
    """Return the SHA-256 of hidden states and logits at 70 positions. Costs about as much as prefilling 70 tokens."""
    vocabulary = vocabulary_of(model)
    branches = [fixed_tokens(f"branch {number}", length, vocabulary) for number, length in enumerate(BRANCHES)]
    packed = pack([Tree(fixed_tokens("prompt", PROMPT, vocabulary), branches)]).to(model.device)
    hidden_NH = forward_hidden(model, packed)
    logits_NV = logits(model, hidden_NH)
    digest = hashlib.sha256(
        f"shoal/fingerprint/1\n{numerics.of(model)}\n{hidden_NH.dtype}\n{logits_NV.dtype}\n".encode()
    )
    for tensor in (hidden_NH, logits_NV):
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
