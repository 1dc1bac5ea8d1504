"""Estimate the time and memory of a whole `shoal run`, from the model's sizes, a step's work and this machine's speed.

A group has one prompt of P tokens and G completions of L tokens: S = P + G L positions. Attention works on K pairs of
positions, K = P(P+1)/2 + G (L P + L(L+1)/2). FLOPs are counted as in `learner/report`, after PaLM (arXiv 2204.02311,
appendix B). `Sizes` defines body, head and width.

    forward(group)  2 body S + 2 head G L + 4 layers width K FLOPs. The last term is attention, which has its own,
                    slower speed
    learner         3 forward passes over the trained groups (a backward pass counts as two), one more to recompute
                    activations, and one more for a reference model. In each update AdamW reads and writes 28 bytes per
                    parameter. Each row of an update moves 14 more, because its gradients are added to a sum. Writing
                    the version takes its bytes / WRITE_BPS
    rollouts        A worker decodes `at_once` completions together. For each position of the longest one, it reads all
                    weights. Each token reads its cache and takes 2 FLOPs per parameter. On a CPU, these times and the
                    prefill's add up
    validation      one forward pass over the generated groups
    broadcast       the version's bytes / LOCAL_BPS
    run             start, steps, and two evaluations. Each evaluation decodes n completions greedily and n with
                    sampling

`measure` measures a CPU's peak speed in a matrix product, and its memory bandwidth. Each kind of work reaches a share
of the peak. The shares come from committed measurements of SmolLM2 on two machines with two cores each: X (Intel, with
AMX) and E (AMD).

    dense       0.40 on X (`exact_speed.json`, 16 tokens), about 0.48 on E (`learner_alone.json`: sequences of at most
                512 tokens, without attention). Products alone reach 0.9 of the peak. The work around them takes a time
                that does not depend on the peak
    attention   for 200 tokens: 0.045 on X (`exact_speed.json`), 0.05 on E (`trl-completions.json`). The scores are
                float32, and the backward pass is slow on short segments
    decode      0.09 on X (`exact_speed.json`, two threads), 0.34 on E (`validation_speed.json`, of one thread's peak).
                Most of the time goes to sampling noise and to logprobs of the whole vocabulary. Faster products do not
                shorten it

All roles share the cores of one machine, so a step takes the sum of their times.
A role's memory is BASE_BYTES, which a process with torch uses before it loads a model (`tiny-exact.json`), plus

    learner     16 bytes per parameter in bf16 (weights 2, gradient 2, fp32 master 4, AdamW's moments 8), 20 in fp32. An
                update with several rows adds 4 for the sum of their gradients. A reference model adds 2, or 4 in fp32.
                Activations of a layer (`layer_bytes`): the residual, two normalised copies of it, attention's output;
                queries and heads' outputs; keys and values; gate, up and their product.
                Logits (`model/logprobs`): at most 128 MiB of float32 values at a time, and as much for their gradients
    worker      weights; keys and values of the completions decoded together, each as long as the longest, plus SPARE
                positions; float32 logits of one position of each completion, in two copies
    validator   weights, activations of one layer, logits as in the learner

Invariant: only `measure` measures anything; the formulas are pure functions of numbers. Without length targets,
completions are assumed to be as long as the config allows. A model that is not a dense decoder gets no estimate. Left
out: biases and norms (under 0.1 %), stragglers, rewards, the first use of a model, evaluations between the first and
the last, GPUs, several devices, fragmentation.
"""

import math
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.cli.preflight.machine import VERSION_BYTES, CheckLine, fails, memory_bytes, ok, warning
from shoal.config import Config
from shoal.config.sections import EVALUATED_AT_ONCE, ROW_TOKENS
from shoal.errors import UserError
from shoal.model import sources
from shoal.tasks.prompt import prompt_tokens
from shoal.tasks.task import Task
from shoal.watch.figures import duration, memory

NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
PRODUCTS = 0.9  # share of a CPU's peak that products reach in training and prefill
AROUND = 475e9  # per core: while products compute this many FLOPs, the work around them takes one second
ATTENTION, DECODE = 27e9, 85e9  # FLOP/s of one core
READING = 0.7  # share of the measured bandwidth reached in decoding and in the optimizer
ADAMW_BYTES = 28  # per parameter: reads master (4), moments (8), gradient (2); writes master, moments, weight (2)
ROW_BYTES = 14  # per parameter: reads a bf16 gradient (2), writes it as float32 (4), reads and writes the sum (8)
WRITE_BPS = 0.55e9  # to write a version to disk in bf16 and sync it: 273 MB in 0.50 s (`update_latency.json`)
LOCAL_BPS = 0.4e9  # speed of a broadcast on a busy machine: whole bytes of a version that travels as a delta
COORDINATION_S = 0.85  # of each step, besides all computing; measured in runs of tiny (`plan.json`)
MEASURE_S = 1.0
MEASURED_BYTES = 1 << 28
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
START_S = (
    40.0  # what measured runs took, besides steps and evaluations, to import, start processes, join and load the model
)
USEFUL = 0.55  # share of groups that are useful, averaged over a run; it was 0.54 in the quickstart
TOO_LARGE = (
    "lower learner.row_tokens, set learner.activation_checkpointing = true or [learner.lora], or use a smaller model"
)
SAMPLE = 64  # prompts whose length is measured


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
    """The work of one step."""

    trained: int  # groups in the batch
    generated: int  # groups that workers generate for it, including those that the online filter drops
    completions: int  # in a group
    prompt: int  # tokens
    length: int  # tokens of a completion, mean
    longest: int  # tokens of the longest completion
    updates: int  # optimizer steps
    reference: bool  # the learner computes a reference model's logprobs
    recomputes: bool  # the learner computes activations twice
    row_tokens: int  # maximum in one forward pass of the learner
    rows: int  # in an update
    at_once: int  # completions that a worker decodes together
    validator_tokens: int  # in one forward pass of the validator

    @property
    def passes(self) -> int:
        """Return the learner's work, in forward passes. A backward pass counts as two."""
        return 3 + self.recomputes + self.reference


def work_of(config: Config, *, prompt: int, length: int, useful: float = 1.0) -> Work:
    """Return the work of a step. `useful`: the share of groups that the online filter keeps."""
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
    """Return the FLOPs of one group's products with the weights, in a forward pass."""
    generated = work.completions * work.length
    return 2.0 * (sizes.body * (work.prompt + generated) + sizes.head * generated)


def attention_flops(sizes: Sizes, work: Work) -> float:
    """Return the FLOPs of one group's attention scores and weighted values, in a forward pass."""
    prompt, length = work.prompt, work.length
    pairs = prompt * (prompt + 1) / 2 + work.completions * (length * prompt + length * (length + 1) / 2)
    return 4.0 * sizes.layers * sizes.width * pairs


# --- speed ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """The FLOP/s of each kind of work, and the bytes per second, of all cores together."""

    dense: float  # training and prefill, without attention
    attention: float
    decode: float
    bandwidth_Bps: float


def speed(flops: float, bandwidth_Bps: float, cores: int) -> Speed:
    """Return the speed of a machine whose cores together reach these measured figures."""
    dense = flops / (1 / PRODUCTS + flops / (AROUND * cores))
    return Speed(dense, ATTENTION * cores, DECODE * cores, bandwidth_Bps * READING)


def measure(dtype: str, device: str = "cpu") -> dict[str, float]:
    """Measure this machine's matrix product in `dtype`, its memory bandwidth (for `speed`), and the size of its memory.

    Return the best values seen in MEASURE_S seconds, because other processes can only slow the machine.
    """
    import torch

    from shoal.model.dtype import measure_gflops

    data = torch.ones(MEASURED_BYTES // 4, device=device)
    gflops, best_s, ends_s = 0.0, float("inf"), time.perf_counter() + MEASURE_S
    while time.perf_counter() < ends_s:
        gflops = max(gflops, measure_gflops(getattr(torch, dtype), device))
        start_s = time.perf_counter()
        data.sum().item()
        best_s = min(best_s, time.perf_counter() - start_s)
    return {"flops": gflops * 1e9, "bandwidth_Bps": MEASURED_BYTES / best_s, "memory_bytes": float(memory_bytes())}


# --- time ------------------------------------------------------------------------------------------------------------


def step_seconds(sizes: Sizes, work: Work, compute_bytes: int, machine: Speed) -> dict[str, float]:
    """Return the seconds that each role's work of one step takes with all cores."""
    return {
        "learner": learner_s(sizes, work, machine),
        "rollouts": rollouts_s(sizes, work, compute_bytes, machine),
        "validation": work.generated * forward_s(sizes, work, machine),
        "broadcast": VERSION_BYTES * sizes.parameters / LOCAL_BPS,
        "coordination": COORDINATION_S,
    }


def forward_s(sizes: Sizes, work: Work, machine: Speed) -> float:
    """Return the seconds of one group's forward pass."""
    return dense_flops(sizes, work) / machine.dense + attention_flops(sizes, work) / machine.attention


def learner_s(sizes: Sizes, work: Work, machine: Speed) -> float:
    moved = work.updates * (ADAMW_BYTES + work.rows * ROW_BYTES) * sizes.parameters
    computing_s = work.passes * work.trained * forward_s(sizes, work, machine)
    return computing_s + moved / machine.bandwidth_Bps + VERSION_BYTES * sizes.parameters / WRITE_BPS


def rollouts_s(sizes: Sizes, work: Work, compute_bytes: int, machine: Speed) -> float:
    completions = work.generated * work.completions
    middle = work.prompt + work.length / 2  # mean number of tokens in the cache
    weights = completions / work.at_once * work.longest * compute_bytes * sizes.parameters
    caches = completions * work.length * middle * cache_bytes_per_token(sizes, compute_bytes)
    computing_s = 2.0 * sizes.parameters * completions * work.length / machine.decode
    prompts_s = 2.0 * sizes.body * work.prompt * work.generated / machine.dense
    return (weights + caches) / machine.bandwidth_Bps + computing_s + prompts_s


# --- memory ----------------------------------------------------------------------------------------------------------


def memory_of(sizes: Sizes, work: Work, compute_bytes: int) -> dict[str, float]:
    """Return the peak memory of one process of each role, in bytes."""
    weights = compute_bytes * sizes.parameters
    state = 2 * weights + MASTER_BYTES * sizes.parameters
    state += SUM_BYTES * sizes.parameters if work.rows > 1 else 0
    state += weights if work.reference else 0
    cache = work.at_once * (work.prompt + work.longest + SPARE) * cache_bytes_per_token(sizes, compute_bytes)
    decoding = weights + cache + 2 * 4 * work.at_once * sizes.vocab
    checking = (
        weights + layer_bytes(sizes, compute_bytes) * work.validator_tokens + _logits(sizes, work.validator_tokens)
    )
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


# --- a whole run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    seconds: float  # until the run's end
    steps: int  # left until the run's end
    step_s: float
    slowest: str  # the role that takes most of a step
    memory_bytes: float  # of all processes together
    machine_bytes: float
    dtype: str


def forecast(config: Config, measured: Mapping[str, Any], cores: int, *, trained: int = 0) -> Forecast | str:
    """Return the forecast, or the reason why there is none. Raise ModelNotFoundError.

    `measured`: "machine" as from `measure`, "dtype" and "prompt_tokens". `trained`: steps trained before a resume.
    """
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
    dtype, here, steps = measured["dtype"], measured["machine"], max(1, config.run.steps - trained)
    machine, compute_bytes = speed(here["flops"], here["bandwidth_Bps"], cores), COMPUTE_BYTES[dtype]
    work = work_of(config, prompt=measured["prompt_tokens"], length=expected_length(config), useful=USEFUL)
    seconds = step_seconds(sizes, work, compute_bytes, machine)
    step_s = sum(seconds.values())
    evaluation_s = 2 * rollouts_s(sizes, evaluation(config, work), compute_bytes, machine)
    return Forecast(
        seconds=START_S + steps * step_s + 2 * evaluation_s,
        steps=steps,
        step_s=step_s,
        slowest=max(seconds, key=lambda role: seconds[role]),
        memory_bytes=together(memory_of(sizes, work, compute_bytes), processes(config)),
        machine_bytes=here["memory_bytes"],
        dtype=dtype,
    )


def findings(run: Forecast | str, unused_bytes: float) -> Iterator[CheckLine]:
    """Yield the findings about a run's time and memory.

    `run`: its forecast, or why there is none. `unused_bytes`: memory that other programs do not use.
    """
    if isinstance(run, str):
        yield ok("time", run)
        return
    pace = f"{run.steps} steps of {duration(run.step_s)}, mostly {run.slowest}"
    yield ok("time", f"about {duration(run.seconds)} in {run.dtype}: {pace}")
    needed = f"about {memory(round(run.memory_bytes))} of {memory(round(run.machine_bytes))}"
    if run.memory_bytes > run.machine_bytes:
        yield fails("memory", needed, TOO_LARGE)
    elif run.memory_bytes > unused_bytes:
        yield warning("memory", f"{needed}, {memory(round(unused_bytes))} free", "end other programs before you start")
    else:
        yield ok("memory", needed)


def prompt_lengths(tokenizer: Any, config: Config, tasks: Iterable[Task]) -> list[int]:
    """Return the length in tokens of these tasks' prompts in the chat template. Raise ChatTemplateError."""
    return [len(prompt_tokens(tokenizer, config.tasks, task, 0)) for task in tasks]


def expected_length(config: Config) -> int:
    """Return the tokens of a completion: the mean length target, or the limit if there are no targets."""
    targets = config.tasks.length_targets
    return round(statistics.fmean(targets)) if targets else config.sampling.max_tokens


def evaluation(config: Config, work: Work) -> Work:
    """Return the work of one pass over the held-out tasks, in groups of one completion."""
    n = config.evaluator.n
    return replace(work, generated=n, completions=1, at_once=min(EVALUATED_AT_ONCE, n))


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
