"""A dense decoder's sizes, and what one step computes with it: tokens and floating-point operations.

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
from shoal.config.sections import ROW_TOKENS
from shoal.errors import UserError
from shoal.model import sources

NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


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


BUNDLED = {  # known before they are made on this machine; a test compares them with the models
    "bundled:smollm2-135m-instruct": Sizes(576, 1536, 30, 576, 192, 49152, True),
    "bundled:tiny": Sizes(256, 704, 4, 256, 128, 128, True),
}


def model_sizes(name: str) -> Sizes:
    """Return the sizes of a model; config.json of the hub's is fetched. Raises SizesError, ModelNotFoundError."""
    return BUNDLED[name] if name in BUNDLED else sizes_of(sources.read_config(name, fetch=True), name)


def sizes_of(config: Mapping[str, Any], name: str = "config.json") -> Sizes:
    """Return the sizes by a config.json; `name`: where they are from, for errors. Raises SizesError."""
    if missing := [field for field in NEEDED if not isinstance(config.get(field), int) or config[field] < 1]:
        raise SizesError(f"{name} lacks {', '.join(missing)}, which this arithmetic needs")
    if experts := next((key for key in EXPERTS if config.get(key)), None):
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


@dataclass(frozen=True)
class Work:
    """One step of a config."""

    trained: int  # groups in a step's batch
    generated: int  # groups that workers must generate for it
    completions: int  # of a group
    prompt: int  # tokens
    length: int  # tokens of a completion, mean
    longest: int  # tokens of the longest completion that is decoded together with others
    updates: int  # of the optimizer in a step
    reference: bool  # the learner computes a reference model's logprobs
    recomputes: bool  # the learner computes activations twice
    row_tokens: int  # in one forward of the learner, at most
    rows: int  # of an update
    at_once: int  # completions that a worker decodes together
    validator_tokens: int  # in one forward of the validator

    @property
    def passes(self) -> int:
        """Of the learner, in forwards: a backward pass has two products for each of the forward's."""
        return 3 + self.recomputes + self.reference


def work_of(config: Config, *, prompt: int, length: int, useful: float = 1.0) -> Work:
    """Return the work of a step of this config, if this share of groups is useful."""
    trained = config.coordinator.prompts_per_step
    useful = useful if config.coordinator.online_filter else 1.0
    learner, completions = config.learner, config.sampling.group_size
    update_tokens = math.ceil(trained / learner.optimizer_steps_per_step) * (prompt + completions * length)
    return Work(
        trained=trained,
        generated=math.ceil(trained / useful),
        completions=completions,
        prompt=prompt,
        length=length,
        longest=max(length, config.sampling.max_tokens),
        updates=learner.optimizer_steps_per_step,
        reference=learner.loss.beta > 0,
        recomputes=learner.activation_checkpointing,
        row_tokens=min(learner.row_tokens, update_tokens),
        rows=math.ceil(update_tokens / learner.row_tokens),
        at_once=config.workers.groups_per_submission * completions,
        validator_tokens=ROW_TOKENS,
    )


def dense_flops(sizes: Sizes, work: Work) -> float:
    """Of one group's forward: products with the weights."""
    generated = work.completions * work.length
    return 2.0 * (sizes.body * (work.prompt + generated) + sizes.head * generated)


def attention_flops(sizes: Sizes, work: Work) -> float:
    """Of one group's forward: scores, and values weighted by them."""
    prompt, length = work.prompt, work.length
    pairs = prompt * (prompt + 1) / 2 + work.completions * (length * prompt + length * (length + 1) / 2)
    return 4.0 * sizes.layers * sizes.width * pairs
