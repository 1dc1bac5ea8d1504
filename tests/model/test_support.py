"""Models that Shoal would compute wrongly are refused when they are loaded; those it computes rightly are not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import (
    DeepseekV32Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
)
from transformers.models.llama import modeling_llama

from shoal.model import attention, support
from shoal.model.load import WEIGHTS, load_model
from shoal.model.support import LENGTH, UnsupportedModelError, _trees, check_config, check_packing

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
DENSE = SIZES | ENDS | ATTENTION | {"intermediate_size": 48}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | ENDS
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
LFM2 = DENSE | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
FULL = ["full_attention"] * 26


def saved(folder: Path, model: str, config: dict[str, Any]) -> Path:
    """A model of random weights, large enough that attention decides the logits."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{model}ForCausalLM", None) or getattr(transformers, f"{model}LMHeadModel")
    built = made(made.config_class(**config))
    for parameter in built.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.12)
    built.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("Llama", DENSE),
        ("Llama", DENSE | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("Llama", DENSE | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}),
        ("Qwen2", DENSE | {"use_sliding_window": False, "sliding_window": 16}),
        ("Qwen3", DENSE | {"head_dim": 8}),
        ("Qwen3Moe", DENSE | {"head_dim": 8} | EXPERTS),
        ("SmolLM3", DENSE | {"no_rope_layers": [1, 0]}),
        ("Olmo2", DENSE),
        ("Phi3", DENSE),
        ("Gemma", DENSE | {"head_dim": 8}),
        ("Granite", DENSE),
        ("Mistral", DENSE | {"sliding_window": None}),
        ("GPT2", GPT2),
        ("GPTNeoX", DENSE),
        ("OPT", SIZES | ENDS | ATTENTION | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_with_full_attention_is_accepted(tmp_path: Path, model: str, config: dict[str, Any]) -> None:
    assert type(load_model(saved(tmp_path, model, config))).__name__.startswith(model)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("Mamba2", SIZES | ENDS | {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}),
        ("FalconMamba", SIZES | ENDS | {"state_size": 8}),
        ("Qwen3Next", DENSE | LINEAR | EXPERTS),
        ("Qwen3_5", DENSE | LINEAR),
        ("Lfm2", LFM2),
        ("Jamba", DENSE | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 1}),
        ("Bamba", DENSE | MAMBA | {"attn_layer_indices": [1]}),
        ("Mpt", {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}),
        ("Bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4} | ENDS),
        ("Falcon", DENSE | {"alibi": True}),
        ("GptOss", DENSE | {"head_dim": 8, "num_local_experts": 4, "layer_types": ["full_attention"] * 2}),
        ("Rwkv", SIZES | ENDS | {"attention_hidden_size": 32, "intermediate_size": 48}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_whose_state_ignores_packing_is_refused_by_name(
    tmp_path: Path, model: str, config: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{tmp_path}.*choose a model with full attention in every layer"):
        load_model(saved(tmp_path, model, config))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_difference_is_measured_in_float32_whatever_the_dtype(tmp_path: Path, dtype: Any) -> None:
    """In bfloat16, rounding alone differs by as much as a state that leaks."""
    folder = saved(tmp_path, "Lfm2", LFM2)
    with pytest.raises(
        UnsupportedModelError, match=r"Lfm2ForCausalLM.* by 0\.05\d* nats per token .*0\.001 is allowed"
    ):
        load_model(folder, dtype)


def test_the_comparison_leaves_the_model_and_the_random_state_as_they_were(tiny_folder: Path) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model = load_model(tiny_folder, "bfloat16")
    assert torch.equal(torch.get_rng_state(), state)
    stored = load_file(tiny_folder / WEIGHTS)
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in stored.items())
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    assert model.config._attn_implementation == attention.NAME
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_window_under_an_unknown_name_is_crossed(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compared sequences are longer than any small number that the config may mean as a window."""
    eager = modeling_llama.eager_attention_forward

    def windowed(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        at = torch.arange(query.shape[2])
        far = at[:, None] - at >= 100
        return eager(module, query, key, value, torch.where(far, torch.finfo(query.dtype).min, mask), **kwargs)

    model = load_model(tiny_folder)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", windowed)
    check_packing(model, tiny_folder)  # too short to show it
    model.config.local_window_tokens = 100
    with pytest.raises(UnsupportedModelError, match="does not keep packed sequences apart"):
        check_packing(model, tiny_folder)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (Gemma3Config(text_config={"sliding_window": 16}), "sliding_window"),
        (MistralConfig(sliding_window=4096), "sliding_window"),
        (Llama4TextConfig(), "attention_chunk_size"),
        (DeepseekV32Config(), "index_topk"),
        (LlamaConfig(layer_types=["sliding_attention"] * 32), "layer_types"),
        (Gemma2Config(sliding_window=None, final_logit_softcapping=None), "attn_logit_softcapping"),
        (GraniteConfig(logits_scaling=2.0), "logits_scaling"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "dynamic"),
        (Phi3Config(rope_parameters=LONGROPE, original_max_position_embeddings=4096), "longrope"),
        (Gemma3TextConfig(sliding_window=None, layer_types=FULL, rope_parameters={FULL[0]: LONGROPE}), "longrope"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_setting_that_acts_on_long_sequences_or_logits_is_refused_by_its_name(config: Any, field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"models/it \({config.model_type}\): .*'{field}'"):
        check_config(config, Path("models/it"))


def test_a_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    LlamaConfig(**DENSE, rope_parameters={"rope_type": "dynamic", "factor": 2.0}).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'dynamic' depends on a sequence's length"):
        load_model(tmp_path)  # there is no weights file


@pytest.mark.parametrize(("positions", "length"), [(12, 12), (LENGTH, LENGTH), (4096, LENGTH)])
def test_the_compared_sequences_fit_the_models_positions(positions: int, length: int) -> None:
    trees = _trees(SimpleNamespace(config=LlamaConfig(max_position_embeddings=positions)))
    lengths = {len(tree.prompt) + len(completion) for tree in trees for completion in tree.completions}
    assert lengths == {length}


@pytest.mark.parametrize(("differs", "refused"), [(0.9e-3, False), (1.1e-3, True), (float("nan"), True)])
def test_the_mean_difference_decides(differs: float, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_packed_logprobs", lambda model, trees: torch.tensor([0.0, 2 * differs]))
    monkeypatch.setattr(support, "_plain_logprobs", lambda model, trees: torch.zeros(2))
    model = SimpleNamespace(config=LlamaConfig(), modules=list)
    if refused:
        with pytest.raises(UnsupportedModelError, match=r"0\.001 is allowed"):
            check_packing(model, Path("model"))
    else:
        check_packing(model, Path("model"))
