"""A Hugging Face folder in, a causal language model out, and back: the only place that reads or writes weights.

Invariant: weights are read from safetensors only, and written as one bf16 `model.safetensors` that
`AutoModelForCausalLM.from_pretrained` loads. A published policy version is such a folder, tokenizer included.
Called by every role that touches weights.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shoal.model.dtype import DtypeName

WEIGHTS = "model.safetensors"
OPENED_FOR = 16  # tensors: what was read of a mapped file counts as this process's memory until it is closed


class UnsupportedModelError(Exception):
    """A model whose logits are not lm_head(hidden), which the proofs and checks rely on."""


def load_model(folder: Path, dtype: DtypeName = "float32", device: str = "cpu") -> Any:
    """The causal LM in `folder`, in eval mode. Returns a transformers model (typed Any: transformers is untyped)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", use_safetensors=True, local_files_only=True
    )
    for field in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(model.config, field, None) not in (None, 1, 1.0):
            raise UnsupportedModelError(f"{folder}: config field {field!r} rescales logits; Shoal does not support it")
    model.eval()
    return model.to(device)


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_weights_(model: Any, folder: Path) -> None:
    """Copy a published version's weights into `model`, in place, tensor by tensor (no second copy in memory)."""
    own = model.state_dict()
    tied = tied_names(model)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        names = set(file.keys())
        missing, unknown = set(own) - names - tied, names - set(own)
        if missing or unknown:
            raise ValueError(f"{folder / WEIGHTS}: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}")
        for name in names:  # all of them before the first copy: a refused file leaves the model as it was
            shape = tuple(file.get_slice(name).get_shape())
            if shape != tuple(own[name].shape):
                raise ValueError(f"{folder / WEIGHTS}: {name} is {shape}, not {tuple(own[name].shape)}")
    ordered = sorted(names)
    for start in range(0, len(ordered), OPENED_FOR):
        with safe_open(folder / WEIGHTS, framework="pt") as file, torch.no_grad():
            for name in ordered[start : start + OPENED_FOR]:
                own[name].copy_(file.get_tensor(name))


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write `model` in bf16 with its config and tokenizer. `folder` must not exist yet."""
    folder.mkdir(parents=True)
    tied = tied_names(model)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = model.config.to_dict() | {"dtype": "bfloat16", "architectures": [type(model).__name__]}
    type(model.config)(**config).save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tied_names(model: Any) -> set[str]:
    """Names in the state dict that share another's storage (an output head tied to the embedding)."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return set()
    return set(model._tied_weights_keys or ())


def eos_ids(folder: Path) -> tuple[int, ...]:
    """The token ids that end a completion, as the folder's generation config and tokenizer declare them."""
    from transformers import GenerationConfig

    declared = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    ids = declared if isinstance(declared, list) else [declared]
    return tuple(dict.fromkeys(i for i in [load_tokenizer(folder).eos_token_id, *ids] if i is not None))
