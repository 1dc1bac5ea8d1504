"""Refuse, at load, models whose logprobs in packed rows differ from those of plain transformers.

Shoal packs the completions of several prompts into one row (`tree`) and keeps them apart by its own attention
(`attention`). Some models pass state between positions in another way, which bypasses this attention: linear attention,
state spaces, convolutions, their own position biases, attention sinks, windows. Such models would train without an
error, but wrongly.

    check_settings    refuse files that make transformers run code, fetch kernels or read other weights
    check_config      refuse config fields that act only on long sequences, which a short comparison would miss
    check_logprobs_   refuse models that differ from transformers' eager attention, one sequence per row; record the scaling
                      and soft-capping of logits after the output head

Tolerance. The comparison runs in float32 whatever dtype the model computes in, because bfloat16 hides the difference:
SmolLM2-135M differs by 6e-6 nats per token in float32 and by 0.08 in bfloat16 (means over 65 tokens, three draws).
Trained models that Shoal computes wrongly differ by 0.1 to 5. Among the causal architectures of transformers 5.23 with
random weights, correctly computed models have means up to 5e-7, and wrongly computed models have means from 1e-2. The
tolerance lies between 5e-7 and 1e-2, and is 150 times the mean of SmolLM2. The mean is compared, not the maximum,
because in a mixture of experts, rounding may send a single token to another expert.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.model import attention, logprobs
from shoal.model.tree import SHORTEST_ROOT, Tree, blocks, forward_hidden, pack

TOLERANCE = 1e-3  # nats per token, mean
LENGTH = 32  # tokens of each compared sequence: prompt and completion
BEYOND = 16  # tokens by which the sequences are longer than every small window
SMALL = 512  # tokens; a larger window is not small
LIMITING = re.compile("window|chunk|local_attention|block_size|topk")  # config fields that may hold a window's size

SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")  # config fields that scale logits
CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap", "softcap")
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
SETTINGS_BYTES = 128 << 20  # a parser takes some ten times as much memory; the largest known tokenizers have 35 MB
UNSAFE = re.compile(  # settings that replace Shoal's attention, run other kernels, or name other files to read
    "_?(attn|experts)_implementation|(quantization|compression|fusion|kernel)_config|transformers_weights|configuration_files"
)
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")  # all rotations change once a sequence exceeds some length


class UnsupportedModelError(ModelError):
    """Shoal would compute this model wrongly. The message names its architecture and what is wrong."""


def check_settings(folder: Path) -> None:
    """Raise UnsupportedModelError if transformers would run code, fetch a kernel, or read other weights for this folder.

    Whoever made the folder may be a stranger. This reads its settings as text, before transformers does.
    """
    for path in folder.glob("*.json"):
        if (size_bytes := path.stat().st_size) > SETTINGS_BYTES:
            raise UnsupportedModelError(
                f"{path} has {size_bytes} bytes; Shoal reads at most {SETTINGS_BYTES} of settings"
            )
    fields: list[tuple[str, Any]] = []  # of all objects, at any depth

    def note(settings: dict[str, Any]) -> dict[str, Any]:
        fields.extend(settings.items())
        return settings

    def read(name: str) -> dict[str, Any]:
        try:
            settings = json.loads((folder / name).read_bytes(), object_hook=note)
        except (OSError, ValueError, RecursionError):
            return {}  # transformers refuses the file, or does without
        return settings if isinstance(settings, dict) else {}

    config, tokenizer = read("config.json"), read("tokenizer_config.json")
    for key, value in fields:
        if UNSAFE.fullmatch(key) and (value is not None or "implementation" in key):
            raise UnsupportedModelError(
                f"{folder} sets {key}, which Shoal does not support: save its weights in bf16 without it"
            )
        is_own = any(value is settings.get(key) for settings in (config, tokenizer))  # not that of a part of the model
        is_known = is_own and config.get("model_type") in transformers.CONFIG_MAPPING
        if key == "auto_map" and value and not is_known:
            raise UnsupportedModelError(f"{folder} needs its own code, which Shoal never runs; choose another model")
    for name in filter(None, (config.get("tokenizer_class"), tokenizer.get("tokenizer_class"))):
        kinds = {getattr(transformers, text, None) for text in (str(name), str(name).removesuffix("Fast"))} - {None}
        if not all(isinstance(kind, type) and issubclass(kind, transformers.PreTrainedTokenizerFast) for kind in kinds):
            raise UnsupportedModelError(f"{folder} has a tokenizer of class {name}, which Shoal does not support")
    if (folder / "adapter_config.json").exists() or any(folder.glob("shard-*-model-*.safetensors")):
        raise UnsupportedModelError(f"{folder} holds adapters or a sharded checkpoint; merge them into its weights")


def long_sequence_field(config: Any) -> str:
    """Return the config field that limits or changes attention over long sequences; "" if there is none."""
    text = config.get_text_config(decoder=True)
    for field in WINDOW_FIELDS:
        if getattr(text, field, None) and getattr(text, "use_sliding_window", True):
            return field
    for kind in WINDOWED_LAYERS:
        if kind in (getattr(text, "layer_types", None) or ()):
            return f"layer_types: {kind}"
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in [rope, *(inner for inner in rope.values() if isinstance(inner, Mapping))]:  # one per layer type
        if parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            return f"rope_type: {parameters['rope_type']}"
    return "attn_logit_softcapping" if getattr(text, "attn_logit_softcapping", None) else ""


def check_config(config: Any, folder: Path) -> None:
    """Raise UnsupportedModelError for a model that a short comparison cannot judge."""
    if field := long_sequence_field(config):
        raise UnsupportedModelError(
            f"{_name(config, folder)} limits or changes attention over long sequences ({field}), which Shoal does not "
            "support; choose another model (docs/recipe.md)"
        )


def _name(config: Any, folder: Path) -> str:
    return f"{folder} ({', '.join(config.architectures or [config.model_type])})"


@torch.no_grad()
def check_logprobs_(model: Any, folder: Path) -> None:
    """Compare the model's logprobs with plain transformers. Record on the model how it changes the head's logits.

    Raise UnsupportedModelError if the logprobs differ.
    """
    name = _name(model.config, folder)
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no output head that transformers knows")
    trees = _trees(model)
    with _explained(f"{name} cannot be computed"), _in_float32(model):
        change, expected_N = _reference(model, trees, name)
        setattr(model, logprobs.ATTRIBUTE, change)
        difference = float((_own_logprobs(model, trees) - expected_N).abs().mean())
    if not difference <= TOLERANCE:
        raise UnsupportedModelError(
            f"{name}: logprobs in packed rows differ from plain transformers by {difference:.2g} nats per token "
            f"({TOLERANCE:g} is allowed); choose another model (docs/recipe.md)"
        )


def _reference(model: Any, trees: list[Tree], name: str) -> tuple[logprobs.LogitChange, Tensor]:
    """Return how plain transformers changes the head's logits, and the completions' logprobs, one sequence per row."""
    ids_BL = torch.tensor([[*tree.prompt, *ids] for tree in trees for ids in tree.completions], device=model.device)
    raw_BLV, logits_BLV = _plain_logits(model, ids_BL)
    if raw_BLV.shape != logits_BLV.shape:
        raise UnsupportedModelError(f"{name}: its logits {tuple(logits_BLV.shape)} are not those of its output head")
    change = change_of_logits(model.config, raw_BLV, logits_BLV)
    if change is None:
        raise UnsupportedModelError(f"{name} changes its output head's logits in a way that Shoal does not know")
    prompts = [len(tree.prompt) for tree in trees for _ in tree.completions]
    logp_BLV = logits_BLV[:, :-1].float().log_softmax(-1)
    logp_BL = logp_BLV.gather(-1, ids_BL[:, 1:, None])[..., 0]
    return change, torch.cat([logp_L[prompt - 1 :] for logp_L, prompt in zip(logp_BL, prompts, strict=True)])


def change_of_logits(config: Any, raw: Tensor, logits: Tensor) -> logprobs.LogitChange | None:
    """Return the change from the head's output to the logits that fits the config and an example; None if none fits."""
    text = config.get_text_config(decoder=True)
    values = [value for field in SCALES if isinstance(value := getattr(text, field, None), int | float) and value != 1]
    scales = [scale for value in values for scale in (float(value), 1 / value)]  # some models divide by the field
    caps = [float(value) for field in CAPS if (value := getattr(text, field, None))]
    for scale in (*scales, 1.0):
        for cap in (*caps, None):
            change = logprobs.LogitChange(scale, cap)
            if float((change(raw).float() - logits.float()).abs().mean()) <= TOLERANCE:
                return change
    return None


@contextmanager
def _explained(problem: str) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, UnsupportedModelError):
        raise
    except Exception as error:  # models that cannot compute packed rows may raise any error
        reason = (str(error).splitlines() or [""])[0][:200]
        raise UnsupportedModelError(f"{problem} ({type(error).__name__}: {reason})") from error


def _trees(model: Any) -> list[Tree]:
    """Return a tree of three completions and a tree of one. All sequences are equally long, without padding."""
    text = model.config.get_text_config(decoder=True)
    sizes = [value for field, value in text.to_dict().items() if LIMITING.search(field) and type(value) is int]
    length = max([LENGTH, *(size + BEYOND for size in sizes if size <= SMALL)])
    length = min(length, getattr(text, "max_position_embeddings", None) or length)
    draw = torch.Generator().manual_seed(0)  # not torch's own generator, because loading must not change its state

    def tokens(count: int) -> list[int]:
        return torch.randint(0, text.vocab_size, (count,), generator=draw).tolist()

    short = length // 4  # short completions, because a leaking state fades within a few tokens
    prompt = tokens(length - short)
    other = [*prompt[:SHORTEST_ROOT], *tokens(2)]  # the prompts share a prefix, so the row has a root
    return [
        Tree(prompt, [tokens(short) for _ in range(3)]),
        Tree(other[: length - 1], [tokens(max(1, length - len(other)))]),
    ]


def _own_logprobs(model: Any, trees: list[Tree]) -> Tensor:
    packed = pack(trees)
    if model.device.type != "cpu":  # this checks the architecture, not a compiled kernel
        layout = attention.RowLayout(packed.layout.spans, model.device, "masked", packed.layout.root)
        packed = replace(packed.to(model.device), layout=layout)
    logp_NV: Tensor = logprobs.logits(model, forward_hidden(model, packed)).float().log_softmax(-1)
    return logp_NV.gather(-1, packed.target_N[:, None])[:, 0]


def _plain_logits(model: Any, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output head's output and the model's logits, one sequence per row."""
    own = model.config._attn_implementation
    raw: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _, __, output: raw.append(output))
    _use_(model, "eager")  # all architectures have it, and it implements sinks and caps
    try:
        logits_BLV: Tensor = model(input_ids=ids_BL, use_cache=False).logits
    finally:
        hook.remove()
        _use_(model, own)
    return raw[-1], logits_BLV


def _use_(model: Any, attention: str) -> None:
    model.set_attn_implementation(attention)
    model.config._attn_implementation = attention  # some old architectures ignore the call, but read this field


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Make `model` compute in float32 within the block. Convert each decoder block's weights only while it runs."""
    units = set(blocks(model))
    inside = {part for block in units for part in block.modules()} - units
    handles = []
    for module in set(model.modules()) - inside:
        weights = [
            weight
            for weight in (*module.parameters(module in units), *module.buffers(module in units))
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
