"""Which models Shoal computes correctly, checked once when a model is loaded.

Shoal packs the completions of several prompts into one row (`tree`) and tells them apart by its own attention
(`attention`). A model that passes state between positions in another way ignores that: linear attention, state spaces,
convolutions, position biases of its own, attention sinks and windows. It would train without an error, but wrongly.

    check_config     refuses settings that act only on long sequences, or on logits, by the field's name
    check_packing    compares packed logprobs with those of transformers' eager attention, one sequence a row

Invariant: `load_model` returns no model that failed either check. Called by `load`.
Left out: slow, exact computation of models that are refused.

Tolerance. The comparison runs in float32 whatever dtype the model computes in, because bfloat16 hides the difference:
SmolLM2-135M differs by 6e-6 nats per token in float32 and by 0.08 in bfloat16 (means over 65 tokens, three draws), and
trained models that are computed wrongly differ by 0.1 to 5. Over the causal architectures of transformers 5.23 with
random weights, the largest mean of a right one is 5e-7 and the smallest of a wrong one 1e-2. The tolerance stands between,
150 times above SmolLM2. The mean counts, not the maximum: in a mixture of experts, rounding may send a single token to
another expert.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.model import attention
from shoal.model.tree import Tree, forward_hidden, pack

TOLERANCE = 1e-3  # nats per token, mean
LENGTH = 32  # tokens of each compared sequence: prompt and completion
BEYOND = 16  # tokens by which the sequences exceed a small window
SMALL = 512  # windows up to this size are crossed
LIMITING = re.compile("window|chunk|local_attention|block_size|topk")  # config fields that may hold a window's size

LOGIT_FIELDS = ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling")
WINDOW_FIELDS = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "attention_window_size",
    "keep_window_size",
    "index_topk",
    "index_topk_blocks",
)
WINDOWED_LAYERS = ("sliding_attention", "chunked_attention", "hybrid_sliding")
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")  # frequencies change with the length of the row
NEXT_STEP = "choose a model with full attention in every layer, such as Llama, Qwen2 or Qwen3"


class UnsupportedModelError(ShoalError):
    """A model that Shoal would compute wrongly; the message names its architecture and what is wrong."""


def check_config(config: Any, folder: Path) -> None:
    """Look at the config of a transformers model and at the text config inside it. Raises UnsupportedModelError."""
    text = config.get_text_config(decoder=True)
    name = f"{folder} ({_architecture(config)})"
    for field in LOGIT_FIELDS:
        if getattr(text, field, None) not in (None, 1, 1.0):
            raise UnsupportedModelError(f"{name}: config field {field!r} changes the logits, which Shoal ignores")
    for field in WINDOW_FIELDS:
        if getattr(text, field, None) and getattr(text, "use_sliding_window", True):
            raise UnsupportedModelError(
                f"{name}: config field {field!r} limits attention, and Shoal attends to whole sequences; {NEXT_STEP}"
            )
    for kind in WINDOWED_LAYERS:
        if kind in (getattr(text, "layer_types", None) or ()):
            raise UnsupportedModelError(
                f"{name}: config field 'layer_types' holds {kind!r}, and Shoal attends to whole sequences; {NEXT_STEP}"
            )
    for kind in _rope_types(text):
        if kind in LENGTH_DEPENDENT_ROPE:
            raise UnsupportedModelError(
                f"{name}: RoPE of type {kind!r} depends on a sequence's length, which differs when sequences are packed; "
                f"{NEXT_STEP}"
            )


@torch.no_grad()
def check_packing(model: Any, folder: Path) -> None:
    """Compare packed with plain logprobs of random tokens, in float32. Raises UnsupportedModelError."""
    trees = _trees(model)
    name = f"{folder} ({_architecture(model.config)})"
    try:
        with _in_float32(model):
            packed_N = _packed_logprobs(model, trees)
            plain_N = _plain_logprobs(model, trees)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # whatever a model does that does not know packed rows
        reason = (str(error).splitlines() or [""])[0][:200]
        raise UnsupportedModelError(
            f"{name} cannot compute packed sequences ({type(error).__name__}: {reason}); {NEXT_STEP}"
        ) from error
    difference_N = (packed_N - plain_N).abs()
    mean = float(difference_N.mean())
    if not mean <= TOLERANCE:
        raise UnsupportedModelError(
            f"{name} does not keep packed sequences apart: logprobs differ from plain transformers by {mean:.2g} nats per "
            f"token (at most {float(difference_N.max()):.2g}; {TOLERANCE:g} is allowed); {NEXT_STEP}"
        )


def _architecture(config: Any) -> str:
    return ", ".join(config.architectures or [config.model_type])


def _rope_types(text: Any) -> set[str]:
    parameters = getattr(text, "rope_parameters", None) or {}
    found = [parameters, *(inner for inner in parameters.values() if isinstance(inner, dict))]  # one per layer type
    return {kind for one in found if isinstance(kind := one.get("rope_type"), str)}


def _trees(model: Any) -> list[Tree]:
    """One tree with three completions and one with one. All sequences have one length, so that none needs padding."""
    text = model.config.get_text_config(decoder=True)
    sizes = [value for field, value in text.to_dict().items() if LIMITING.search(field) and type(value) is int]
    length = max([LENGTH, *(size + BEYOND for size in sizes if size <= SMALL)])
    length = min(length, getattr(text, "max_position_embeddings", None) or length)
    draw = torch.Generator().manual_seed(0)  # of its own: loading a model must not move torch's random state

    def tokens(count: int) -> list[int]:
        return torch.randint(0, text.vocab_size, (count,), generator=draw).tolist()

    short = length // 4  # short completions: a state that leaks fades within a few tokens
    return [
        Tree(tokens(length - short), [tokens(short) for _ in range(3)]),
        Tree(tokens(length // 2), [tokens(length - length // 2)]),
    ]


def _packed_logprobs(model: Any, trees: list[Tree]) -> Tensor:
    packed = pack(trees)
    if model.device.type != "cpu":  # the architecture is checked here, not a compiled kernel
        layout = attention.Layout(packed.layout.spans, model.device, kernel="masked")
        packed = replace(packed.to(model.device), layout=layout)
    logp_NV: Tensor = model.lm_head(forward_hidden(model, packed)).float().log_softmax(-1)
    return logp_NV.gather(-1, packed.target_N[:, None])[:, 0]


def _plain_logprobs(model: Any, trees: list[Tree]) -> Tensor:
    """Logprobs of the same tokens by transformers alone: its forward, its eager attention, one sequence a row."""
    sequences = [[*tree.prompt, *completion] for tree in trees for completion in tree.completions]
    prompts = [len(tree.prompt) for tree in trees for _ in tree.completions]
    ids_BL = torch.tensor(sequences, device=model.device)
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        logp_BLV = model(input_ids=ids_BL, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    finally:
        model.set_attn_implementation(own)
    logp_BL = logp_BLV.gather(-1, ids_BL[:, 1:, None])[..., 0]
    return torch.cat([logp_L[prompt - 1 :] for logp_L, prompt in zip(logp_BL, prompts, strict=True)])


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Within it, `model` computes in float32. A block's weights are converted while it runs: one at a time is held."""
    blocks = max((list(module) for module in model.modules() if isinstance(module, nn.ModuleList)), key=len, default=[])
    inside = {part for block in blocks for part in block.modules()}
    handles = []
    for module in model.modules():
        if module in inside and module not in blocks:
            continue
        weights = [
            weight
            for weight in (*module.parameters(module in blocks), *module.buffers(module in blocks))
            if weight.is_floating_point() and weight.dtype != torch.float32
        ]
        if weights:
            handles += _convert_while_running(module, weights)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _convert_while_running(module: nn.Module, weights: list[Tensor]) -> list[Any]:
    originals = [weight.data for weight in weights]

    def convert(*_: Any) -> None:
        for weight in weights:
            weight.data = weight.data.float()

    def restore(*_: Any) -> None:
        for weight, original in zip(weights, originals, strict=True):
            weight.data = original

    return [module.register_forward_pre_hook(convert), module.register_forward_hook(restore, always_call=True)]
