"""A dense decoder's sizes, and what one step computes with it: tokens, floating-point operations, bytes.

    attention of a layer   hidden x (heads + 2 kv_heads) x head_dim, and heads x head_dim x hidden back
    MLP of a layer         3 x hidden x intermediate (gate, up, down)
    head                   vocabulary x hidden, twice in memory unless tied to the embedding

A group is a tree: one prompt of P tokens, G completions of L. With S = P + G L positions, and pairs of positions that
attention computes K = P(P+1)/2 + G (L P + L(L+1)/2), as in `learner/report`, after PaLM (arXiv 2204.02311, appendix B):

    forward(group)  = 2 body S + 2 head G L + 4 layers width K
    learner         = (3 + extra) forward x trained groups; extra: 1 to recompute activations, 1 for a reference model
    validator       = forward x generated groups

Attention's share of it, 4 layers width K, is kept apart: its products are small, and slower.
Invariant: whole groups; `generated` counts those that the online filter drops too. A model that is not of this form is
refused, not guessed. Left out: biases and norms (under 0.1 %).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.config import Config
from shoal.errors import UserError

OPTIONAL = ("head_dim", "num_key_value_heads")
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
COMPUTE_BYTES = {"bfloat16": 2, "float32": 4}
VERSION_BYTES = 2  # per parameter: versions are published in bf16


class SizesError(UserError):
    """A config.json whose sizes are not those of a dense decoder."""


@dataclass(frozen=True)
class Sizes:
    hidden: int
    intermediate: int
    layers: int
    width: int  # of attention: heads x head size
    kv_width: int  # of keys, and of values
    vocab: int
    tied: bool

    @property
    def body(self) -> int:
        """Parameters of the matrices that every position goes through."""
        attention = self.hidden * (self.width + 2 * self.kv_width) + self.width * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        return self.body + self.head * (1 if self.tied else 2)


def sizes_of(config: Mapping[str, Any], name: str = "config.json") -> Sizes:
    """Sizes by a config.json; `name`: where they are from, for errors. Raises SizesError."""
    if missing := [field for field in NEEDED if not isinstance(config.get(field), int)]:
        raise SizesError(f"{name} lacks {', '.join(missing)}, which this arithmetic needs")
    if wrong := [field for field in (*NEEDED, *OPTIONAL) if isinstance(config.get(field), int) and config[field] < 1]:
        raise SizesError(f"{name}: {wrong[0]} = {config[wrong[0]]}: a size is 1 or more")
    if experts := next(
        (key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), None
    ):
        raise SizesError(f"{name}: {experts} makes it a mixture of experts, which this arithmetic does not cover")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    return Sizes(
        hidden=hidden,
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        width=heads * head_dim,
        kv_width=(config.get("num_key_value_heads") or heads) * head_dim,
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
    )


BUNDLED = {  # known before they are made on this machine; a test compares them with the models
    "bundled:smollm2-135m-instruct": Sizes(576, 1536, 30, 576, 192, 49152, True),
    "bundled:tiny": Sizes(256, 704, 4, 256, 128, 128, True),
}


@dataclass(frozen=True)
class Work:
    trained: int  # groups in a step's batch
    generated: int  # groups that workers must generate for it
    completions: int  # of a group
    prompt: int  # tokens
    length: int  # tokens of a completion, mean
    longest: int  # tokens of the longest completion that is decoded together with others
    updates: int  # of the optimizer in a step
    extra_forwards: int  # of the learner, for each training pass
    row_tokens: int  # in one forward of the learner, at most
    rows: int  # of an update, on one device
    recomputes: bool
    at_once: int  # completions that a worker decodes together
    validator_tokens: int  # in one forward of the validator


def work_of(config: Config, *, prompt: int, length: int, useful: float = 1.0) -> Work:
    """The work of a step of this config, if this share of groups is useful."""
    trained = config.coordinator.prompts_per_step
    useful = useful if config.coordinator.online_filter else 1.0
    learner = config.learner
    update_tokens = math.ceil(trained / learner.optimizer_steps_per_step) * (
        prompt + config.sampling.group_size * length
    )
    return Work(
        trained=trained,
        generated=math.ceil(trained / useful),
        completions=config.sampling.group_size,
        prompt=prompt,
        length=length,
        longest=max(length, config.sampling.max_tokens),
        updates=learner.optimizer_steps_per_step,
        extra_forwards=int(learner.activation_checkpointing) + int(learner.loss.beta > 0),
        row_tokens=min(learner.row_tokens, update_tokens),
        rows=math.ceil(update_tokens / learner.row_tokens),
        recomputes=learner.activation_checkpointing,
        at_once=config.workers.groups_per_submission * config.sampling.group_size,
        validator_tokens=config.validator.row_tokens,
    )


def forward_flops(sizes: Sizes, work: Work) -> float:
    """Of one group. The formula is above."""
    return dense_flops(sizes, work) + attention_flops(sizes, work)


def dense_flops(sizes: Sizes, work: Work) -> float:
    """Of one group's forward: products with the weights."""
    generated = work.completions * work.length
    return 2.0 * (sizes.body * (work.prompt + generated) + sizes.head * generated)


def attention_flops(sizes: Sizes, work: Work) -> float:
    """Of one group's forward: scores, and values weighted by them."""
    prompt, length = work.prompt, work.length
    pairs = prompt * (prompt + 1) / 2 + work.completions * (length * prompt + length * (length + 1) / 2)
    return 4.0 * sizes.layers * sizes.width * pairs


def passes(work: Work) -> int:
    """Of the learner, in forwards: a backward pass has two products for each of the forward's."""
    return 3 + work.extra_forwards


def training_flops(sizes: Sizes, work: Work) -> float:
    """Of a step."""
    return passes(work) * forward_flops(sizes, work) * work.trained


def cache_bytes_per_token(sizes: Sizes, compute_bytes: int) -> int:
    """Keys and values of one token, in all layers."""
    return 2 * sizes.layers * sizes.kv_width * compute_bytes


def version_bytes(sizes: Sizes) -> int:
    return VERSION_BYTES * sizes.parameters
