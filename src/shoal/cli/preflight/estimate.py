"""Estimate the memory of a whole `shoal run` from the model's sizes and a step's work, and share the cores among roles.

A role's memory is BASE_BYTES, which a process with torch uses before it loads a model (`tiny-exact.json`), plus

    learner     16 bytes per parameter in bf16 (weights 2, gradient 2, fp32 master 4, AdamW's moments 8), 20 in fp32. An
                update with several rows adds 4 for the sum of their gradients. A reference model adds 2, or 4 in fp32.
                Activations of a layer (`layer_bytes`): the residual, two normalised copies of it, attention's output;
                queries and heads' outputs; keys and values; gate, up and their product.
                Logits (`model/logprobs`): at most 128 MiB of float32 values at a time, and as much for their gradients
    worker      weights; keys and values of the completions decoded together, each as long as the longest, plus SPARE
                positions; float32 logits of one position of each completion, in two copies
    validator   weights, activations of one layer, logits as in the learner

Invariant: the formulas are pure functions of numbers. Without length targets, completions are assumed to be as long as
the config allows. A model that is not a dense decoder gets no estimate. Left out: time, which only the run's own steps
can tell; biases and norms (under 0.1 %), GPUs, several devices, fragmentation.
"""

import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.cli.preflight.machine import CheckLine, fails, ok, warning
from shoal.config import Config
from shoal.config.sections import ROW_TOKENS
from shoal.errors import UserError
from shoal.model import sources
from shoal.watch.figures import memory

NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
COMPUTE_BYTES = {"bfloat16": 2, "float32": 4}

MB = 10**6
BASE_BYTES = {  # of a process, without its model
    "coordinator": 325 * MB,
    "origin": 345 * MB,
    "relay": 330 * MB,
    "learner": 760 * MB,
    "worker": 520 * MB,
    "validator": 580 * MB,
    "evaluator": 430 * MB,
}
SHARED_BYTES = 320 * MB  # the part of BASE_BYTES shared by all children that `shoal run` forks
LOGITS_BYTES = 2 * (128 << 20)
MASTER_BYTES = 12  # fp32 master and two moments
SUM_BYTES = 4  # fp32 sum of the gradients of several rows
SPARE = 128  # positions by which the engine's buffers grow (`engine/rows`)


# --- a model's sizes, and the work of a step --------------------------------------------------------------------------


class SizesError(UserError):
    """A config.json does not describe a dense decoder."""


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
        """Return the number of parameters of the matrices that every position goes through."""
        attention = self.hidden * (self.width + 2 * self.kv_width) + self.width * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        return self.body + self.head * (1 if self.tied else 2)


BUNDLED = {  # needed before the models are made on this machine; a test compares them with the models
    "bundled:smollm2-135m-instruct": Sizes(576, 1536, 30, 576, 192, 49152, True),
    "bundled:tiny": Sizes(256, 704, 4, 256, 128, 128, True),
}


def model_sizes(name: str) -> Sizes:
    """Return a model's sizes; for a model of the hub, fetch its config.json. Raise SizesError, ModelNotFoundError."""
    return BUNDLED[name] if name in BUNDLED else sizes_of(sources.read_config(name, fetch=True), name)


def sizes_of(config: Mapping[str, Any], name: str = "config.json") -> Sizes:
    """Return the sizes that a config.json states. `name`: the model, for errors. Raise SizesError."""
    if missing := [field for field in NEEDED if not isinstance(config.get(field), int) or config[field] < 1]:
        raise SizesError(f"{name} lacks {', '.join(missing)}, which the estimate needs")
    if experts := next((key for key in EXPERTS if config.get(key)), None):
        raise SizesError(f"{name}: {experts} makes it a mixture of experts, which the estimate does not cover")
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
    """The work of one step, as far as memory depends on it."""

    prompt: int  # tokens
    longest: int  # tokens of the longest completion
    reference: bool  # the learner computes a reference model's logprobs
    recomputes: bool  # the learner computes activations twice
    row_tokens: int  # maximum in one forward pass of the learner
    rows: int  # in an update
    at_once: int  # completions that a worker decodes together


def work_of(config: Config, prompt: int) -> Work:
    """Return the work of a step. `prompt`: tokens of a prompt. Completions have the mean length target, or the limit."""
    targets, longest = config.tasks.length_targets, config.sampling.max_tokens
    length = round(statistics.fmean(targets)) if targets else longest
    learner, completions = config.learner, config.sampling.group_size
    groups = math.ceil(config.coordinator.prompts_per_step / learner.optimizer_steps_per_step)
    update_tokens = groups * (prompt + completions * length)
    return Work(
        prompt=prompt,
        longest=max(length, longest),
        reference=learner.loss.beta > 0,
        recomputes=learner.activation_checkpointing,
        row_tokens=min(learner.row_tokens, update_tokens),
        rows=math.ceil(update_tokens / learner.row_tokens),
        at_once=config.workers.groups_per_submission * completions,
    )


# --- memory ----------------------------------------------------------------------------------------------------------


def memory_of(sizes: Sizes, work: Work, compute_bytes: int) -> dict[str, float]:
    """Return the peak memory of one process of each role, in bytes."""
    weights = compute_bytes * sizes.parameters
    state = 2 * weights + MASTER_BYTES * sizes.parameters
    state += SUM_BYTES * sizes.parameters if work.rows > 1 else 0
    state += weights if work.reference else 0
    cache = work.at_once * (work.prompt + work.longest + SPARE) * cache_bytes_per_token(sizes, compute_bytes)
    decoding = weights + cache + 2 * 4 * work.at_once * sizes.vocab
    checking = weights + layer_bytes(sizes, compute_bytes) * ROW_TOKENS + _logits(sizes, ROW_TOKENS)
    models = {
        "learner": state + activation_bytes(sizes, work, compute_bytes) + _logits(sizes, work.row_tokens),
        "worker": decoding,
        "validator": checking,
        "evaluator": decoding,
    }
    return {role: base + models.get(role, 0.0) for role, base in BASE_BYTES.items()}


def together(roles: Mapping[str, float], counts: Mapping[str, int]) -> float:
    """Return the memory of all processes of `shoal run` in bytes, with shared pages counted once."""
    return sum(roles[role] * count for role, count in counts.items()) - (sum(counts.values()) - 1) * SHARED_BYTES


def _logits(sizes: Sizes, tokens: int) -> int:
    return min(LOGITS_BYTES, 2 * 4 * sizes.vocab * tokens)


def cache_bytes_per_token(sizes: Sizes, compute_bytes: int) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return 2 * sizes.layers * sizes.kv_width * compute_bytes


def layer_bytes(sizes: Sizes, compute_bytes: int) -> int:
    """Return the bytes per token that one layer saves for the backward pass."""
    elements = 4 * sizes.hidden + 2 * sizes.width + 2 * sizes.kv_width + 3 * sizes.intermediate
    return elements * compute_bytes


def activation_bytes(sizes: Sizes, work: Work, compute_bytes: int) -> int:
    each = layer_bytes(sizes, compute_bytes)
    if work.recomputes:
        gradients = 3 * sizes.intermediate  # of gate, up and their product
        return work.row_tokens * (compute_bytes * (sizes.layers * sizes.hidden + gradients) + each)
    return work.row_tokens * sizes.layers * each


def needed_bytes(config: Config, dtype: str, prompt: int) -> float | str:
    """Return the memory of all processes of `shoal run`, or why it is not estimated. Raise ModelNotFoundError."""
    not_covered = {
        "a GPU": config.model.device != "cpu",
        "adapters": config.learner.lora,
        "sites": config.learner.sites,
        "workers elsewhere": not config.workers.count,
    }
    if reasons := [what for what, applies in not_covered.items() if applies]:
        return f"not estimated for {' and '.join(reasons)}"
    try:
        sizes = model_sizes(config.model.name)
    except SizesError as error:
        return f"not estimated: {error}"
    return together(memory_of(sizes, work_of(config, prompt), COMPUTE_BYTES[dtype]), processes(config))


def memory_finding(needed: float | str, total_bytes: int, unused_bytes: int) -> CheckLine:
    """Return the finding about a run's memory.

    `needed`: from `needed_bytes`. `unused_bytes`: memory that other programs do not use.
    """
    if isinstance(needed, str):
        return ok("memory", needed)
    text = f"about {memory(round(needed))} of {memory(total_bytes)}"
    if needed > total_bytes:
        less = "lower learner.row_tokens, set learner.activation_checkpointing = true or [learner.lora]"
        return fails("memory", text, f"{less}, or use a smaller model")
    if needed > unused_bytes:
        return warning("memory", f"{text}, {memory(unused_bytes)} free", "end other programs before you start")
    return ok("memory", text)


# --- cores -----------------------------------------------------------------------------------------------------------


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):  # on macOS
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def processes(config: Config) -> dict[str, int]:
    """Return the number of processes of each role that `shoal run` starts, with a learner at one site."""
    more = {"relay": config.relays.count, "worker": config.workers.count, "validator": config.validator.count}
    return {"coordinator": 1, "origin": 1, "evaluator": 1, "learner": 1} | more


def share_threads(config: Config, cores: int) -> dict[str, int]:
    """Return the threads for each role that computes: at least one, and together at most `cores` if possible.

    With async level 0, generating, checking and learning take turns, so each gets all cores. A learner's sites share its
    threads. The evaluator gets all cores, because the last evaluation has the machine to itself.
    """
    sites = max(1, config.learner.sites)
    if config.coordinator.async_level == 0:
        return {
            "learner": max(1, cores // sites),
            "validator": max(1, cores // config.validator.count),
            "worker": max(1, cores // max(1, config.workers.count)),
            "evaluator": cores,
        }
    learner = max(1, cores // 2)
    each_worker = max(1, (cores - learner) // (config.workers.count + 1))
    return {"learner": max(1, learner // sites), "validator": each_worker, "worker": each_worker, "evaluator": cores}
