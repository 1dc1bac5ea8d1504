"""What one step computes, in tokens, floating-point operations and bytes.

A group is a tree: one prompt of P tokens, G completions of L. With S = P + G L positions, and pairs of positions that
attention computes K = P(P+1)/2 + G (L P + L(L+1)/2), as in `learner/metrics`, after PaLM (arXiv 2204.02311, appendix B):

    forward(group)  = 2 body S + 2 head G L + 4 layers width K
    learner         = (3 + extra) forward x trained groups; extra: 1 to recompute activations, 1 for a reference model
    validator       = forward x generated groups

Attention's share of it, 4 layers width K, is kept apart: its products are small, and slower.
Invariant: whole groups; `generated` counts those that the online filter drops too.
"""

import math
from dataclasses import dataclass

from shoal.config import Config
from shoal.plan.sizes import Sizes

COMPUTE_BYTES = {"bfloat16": 2, "float32": 4}
VERSION_BYTES = 2  # per parameter: versions are published in bf16


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
    offloads: bool = False  # masters, optimizer state and summed gradients are on the learner's host


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
        offloads=learner.offload,
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
