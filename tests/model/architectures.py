"""Tiny random models of transformers' architectures. PACKED ones are supported, REFUSED ones are not (docs/recipe.md).

`SIZES` has the size fields that architectures share. `EXTRA` has further fields of single architectures.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PACKED = (
    *("apertus", "cohere", "ernie4_5", "ernie4_5_moe", "gemma", "glm4", "glm4_moe", "gpt2", "gpt_neox", "granite"),
    *("granitemoe", "llama", "minimax_m2", "mixtral", "nanochat", "olmo2", "olmoe", "opt", "phi3", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2"),
)
REFUSED = (  # they are not causal, or have layers in the head, windows, position biases or states passed along
    *("bloom", "cohere2", "deepseek_v3", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "granitemoehybrid", "jamba"),
    *("lfm2", "llama4_text", "mamba2", "minimax", "mistral", "nemotron_h", "olmo3", "qwen3_5_text", "qwen3_next"),
    *("stablelm", "bert", "modernbert-decoder"),
)

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 48, "max_position_embeddings": 256, "head_dim": 8, "v_head_dim": 12, "rotary_dim": 4},
    **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 48, "d_model": 32, "n_heads": 4},
    **{"n_layers": 2, "max_seq_len": 256, "ffn_dim": 48, "word_embed_proj_dim": 32, "decoder_layers": 2},
    **{"moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_group": 1},
    **{"num_experts_per_tok": 2, "n_shared_experts": 1, "topk_group": 1, "num_shared_experts": 1},
    **{"shared_expert_intermediate_size": 16, "shared_intermediate_size": 16, "first_k_dense_replace": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_num_heads": 4},
    **{"mamba_head_dim": 16, "state_size": 8, "ssm_state_size": 8, "n_groups": 1, "time_step_rank": 4},
    **{"sliding_window": 12, "attention_chunk_size": 12, "attention_hidden_size": 32, "embedding_size": 32},
    **{"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0},
    **{"block_auto_adjust_ff_dim": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXTRA: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


def create(folder: Path, name: str, **config: Any) -> Path:
    """Save a model of this architecture in `folder`, with weights so large that attention decides the logits."""
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    torch.manual_seed(0)
    model = kind(kind.config_class(**_sizes(kind.config_class) | EXTRA.get(name, {}) | config))
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.12)
    model.save_pretrained(folder)
    return folder


def _sizes(config: Any) -> dict[str, Any]:
    default = config()
    fixed = {field for field in dir(config) if isinstance(getattr(config, field, None), property)}
    known = {field: value for field, value in SIZES.items() if getattr(default, field, None) is not None}
    sizes = {field: value for field, value in known.items() if field not in fixed} | {"vocab_size": 64}
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = 4
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if kinds and "layer_types" not in fixed:
        sizes["layer_types"] = (kinds * 2)[:2] if len(kinds) <= 2 else kinds
        sizes["num_hidden_layers"] = len(sizes["layer_types"])
    if getattr(default, "mlp_layer_types", None):
        sizes["mlp_layer_types"] = (["dense", "sparse"] * 4)[: sizes["num_hidden_layers"]]
    return sizes
