"""TRL's settings: those that `--tune` tries, and those that the measurement uses.

Each entry overrides the shared recipe (`peer.py`). `weights` is the dtype in which the model is loaded, and `attention` its
attention implementation. The others are fields of GRPOConfig, where `bf16` means autocast, which bf16 weights do not need.
"""

from typing import Any

LEAN = {"bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False}
BF16 = LEAN | {"weights": "bfloat16"}

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {"weights": "float32", "per_device_train_batch_size": 8},  # autocast and gradient checkpointing
    "autocast x8": LEAN | {"weights": "float32", "bf16": True, "per_device_train_batch_size": 8},
    "autocast x16": LEAN | {"weights": "float32", "bf16": True, "per_device_train_batch_size": 16},
    "float32 x16": LEAN | {"weights": "float32", "per_device_train_batch_size": 16},
    "bf16 x4": BF16 | {"per_device_train_batch_size": 4},
    "bf16 x8": BF16 | {"per_device_train_batch_size": 8},
    "bf16 x16": BF16 | {"per_device_train_batch_size": 16},
    "bf16 x64": BF16 | {"per_device_train_batch_size": 64},
    "bf16 x16 eager": BF16 | {"per_device_train_batch_size": 16, "attention": "eager"},
    "bf16 x16 static cache": BF16 | {"per_device_train_batch_size": 16, "cache_implementation": "static"},
    "bf16 x16 continuous": BF16 | {"per_device_train_batch_size": 16, "use_transformers_continuous_batching": True},
    "bf16 x16 compiled": BF16 | {"per_device_train_batch_size": 16, "torch_compile": True},
    "bf16 x16 liger": BF16 | {"per_device_train_batch_size": 16, "use_liger_kernel": True},
    "autocast x8 vllm": LEAN
    | {
        "weights": "float32",
        "bf16": True,
        "per_device_train_batch_size": 8,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 512,
    },
    "bf16 x16 untruncated": BF16 | {"per_device_train_batch_size": 16, "mask_truncated_completions": True},
}
# The measurement uses two entries: one with bf16 weights, which are faster, and one with float32 weights, as in Shoal's
# learner. Each was chosen by one run, which the recorded --tune does not contain. GSM8K uses the same two. At these learning
# rates much of an update is smaller than a bf16 step, so it is lost if the weights themselves are bf16.
CHOSEN = ("bf16 x8", "autocast x8")
