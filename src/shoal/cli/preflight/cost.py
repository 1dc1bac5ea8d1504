"""Seconds and bytes of each role for one step, from the measured speed of the cores.

A CPU's matrix product and memory are measured (`measure`); how much of its peak each kind of work gets follows from
committed measurements of SmolLM2 on two-core machines, X with Intel's AMX and E from AMD:

    dense       0.40 X (`exact_speed.json`, 16 tokens), 0.47 E (`learner_alone.json`, 512 against 4,096 tokens): products at
                0.9 of the peak, plus what is around them, which takes the same time whatever the peak
    attention   at 200 tokens 0.045 X (`exact_speed.json`) and 0.05 E (`trl-completions.json`), what an update takes more
                than at 16: float32 scores and a backward pass that is slow over short segments
    decode      0.09 X (`exact_speed.json`, two threads), 0.34 E (`validation_speed.json`, one thread, of its peak): the
                vocabulary's noise and logprobs are most of it, and gain nothing from faster products

    learner     passes x (dense + attention) + updates x 28 and rows x 14 bytes a parameter: AdamW reads and writes its
                state, and each row's gradients are added to those of the rows before; + the version's bytes / WRITE_BPS
    rollouts    rounds of `at_once` completions: weights are read until the longest has ended; each token reads its cache and
                computes 2 FLOPs a parameter. Both add up, as on a CPU. Plus prompts' prefill.
    validation  (dense + attention) x generated
    broadcast   the version's bytes / LOCAL_BPS

All roles share the cores of one machine, which their work keeps busy, so a step takes the sum of it. What one role waits for
another is hidden by the others' work.

Memory of a role is what a process with torch holds before any model (BASE_BYTES, of runs of a 3M model:
`tiny-exact.json`), and

    learner     16 bytes a parameter in bf16 (weights 2, gradient 2, fp32 master 4, AdamW's moments 8), 20 in fp32; 4 more
                if an update has several rows, for the sum of their gradients; a reference model 2 or 4
    activations a saved tensor's elements per token and layer: 4 hidden (the residual, twice normalised, attention's output),
                2 width (queries, heads' outputs), 2 kv_width, 3 intermediate (gate, up, their product). With recomputation:
                `hidden` of each layer, one layer's own, and the gradients of its three intermediates
    logits      2 x 128 MiB of float32 at a time, value and gradient (`model/logprobs`), or less where all are fewer
    worker      weights, keys and values of the completions decoded together, all as long as the longest and up to SPARE
                positions, float32 logits of one position
    validator   weights, one layer's activations, logits as above

Invariant: pure functions of numbers, except for `measure`. Left out: stragglers, tasks' rewards, start-up, GPUs, several
devices, fragmentation; that cores idle where one role has most of the work and a part of them.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.cli.preflight.machine import memory_bytes
from shoal.cli.preflight.work import Sizes, Work, attention_flops, dense_flops

PRODUCTS = 0.9  # share of peak of a CPU's products in training and prefill
AROUND = 475e9  # FLOP/s of products that would take as long as what is around them does on one core
ATTENTION, DECODE = 27e9, 85e9  # FLOP/s of one core
READING = 0.7  # of the measured bandwidth, in decoding and in the optimizer
ADAMW_BYTES = 28  # per parameter: reads 4 + 8 + 2, writes 4 + 8 + 2
ROW_BYTES = 14  # per parameter: reads a bf16 gradient, 2, writes it as float32, 4, reads and writes the sum, 8
WRITE_BPS = 0.55e9  # a version to disk, as bf16, synced: `update_latency.json`, 273 MB in 0.50 s
LOCAL_BPS = 0.4e9  # from origin over relay to client, as a delta, on a busy machine: `plan.json`, 1.5 and 1.8 s
COORDINATION_S = 0.85  # what remains of a step with hardly any products (runs of tiny, `plan.json`)
MEASURE_S = 1.0
MEASURED_BYTES = 1 << 28
COMPUTE_BYTES = {"bfloat16": 2, "float32": 4}
VERSION_BYTES = 2  # per parameter: versions are published in bf16

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
SHARED_BYTES = 320 * MB  # of these, in every child that `shoal run` forks
LOGITS_BYTES = 2 * (128 << 20)
MASTER_BYTES = 12  # fp32 master and two moments
SUM_BYTES = 4  # fp32 sum of the gradients of several rows
SPARE = 128  # positions by which the engine's buffers grow (`engine/rows`)


@dataclass(frozen=True)
class Speed:
    """Of all cores together: floating-point operations a second of each kind of work, and bytes a second."""

    dense: float  # training and prefill, without attention
    attention: float
    decode: float
    bandwidth_Bps: float


def speed(flops: float, bandwidth_Bps: float, cores: int) -> Speed:
    """Return the speed by what all cores together measure. `flops` differ more between CPUs than the work around them."""
    dense = flops / (1 / PRODUCTS + flops / (AROUND * cores))
    return Speed(dense, ATTENTION * cores, DECODE * cores, bandwidth_Bps * READING)


def measure(dtype: str, device: str = "cpu") -> dict[str, float]:
    """Measure this machine's matrix product in `dtype`, its reading of memory (for `speed`), and how much memory it has.

    The best of MEASURE_S seconds, since other processes only slow it.
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
    """Return the seconds that one step takes of each role's work, with all cores."""
    return {
        "learner": learner_s(sizes, work, machine),
        "rollouts": rollouts_s(sizes, work, compute_bytes, machine),
        "validation": work.generated * forward_s(sizes, work, machine),
        "broadcast": VERSION_BYTES * sizes.parameters / LOCAL_BPS,
        "coordination": COORDINATION_S,
    }


def forward_s(sizes: Sizes, work: Work, machine: Speed) -> float:
    """Of one group."""
    return dense_flops(sizes, work) / machine.dense + attention_flops(sizes, work) / machine.attention


def learner_s(sizes: Sizes, work: Work, machine: Speed) -> float:
    moved = work.updates * (ADAMW_BYTES + work.rows * ROW_BYTES) * sizes.parameters
    computing_s = work.passes * work.trained * forward_s(sizes, work, machine)
    return computing_s + moved / machine.bandwidth_Bps + VERSION_BYTES * sizes.parameters / WRITE_BPS


def rollouts_s(sizes: Sizes, work: Work, compute_bytes: int, machine: Speed) -> float:
    completions = work.generated * work.completions
    middle = work.prompt + work.length / 2  # tokens in the cache, on the average
    weights = completions / work.at_once * work.longest * compute_bytes * sizes.parameters
    caches = completions * work.length * middle * cache_bytes_per_token(sizes, compute_bytes)
    computing_s = 2.0 * sizes.parameters * completions * work.length / machine.decode
    prompts_s = 2.0 * sizes.body * work.prompt * work.generated / machine.dense
    return (weights + caches) / machine.bandwidth_Bps + computing_s + prompts_s


# --- memory ----------------------------------------------------------------------------------------------------------


def memory_of(sizes: Sizes, work: Work, compute_bytes: int) -> dict[str, float]:
    """Return the bytes that one process of each role holds at its peak."""
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
    """Return what all processes of `shoal run` hold, shared pages counted once."""
    return sum(roles[role] * count for role, count in counts.items()) - (sum(counts.values()) - 1) * SHARED_BYTES


def _logits(sizes: Sizes, tokens: int) -> int:
    return min(LOGITS_BYTES, 2 * 4 * sizes.vocab * tokens)


def cache_bytes_per_token(sizes: Sizes, compute_bytes: int) -> int:
    """Keys and values of one token, in all layers."""
    return 2 * sizes.layers * sizes.kv_width * compute_bytes


def layer_bytes(sizes: Sizes, compute_bytes: int) -> int:
    """What one layer saves of a token for the backward pass."""
    elements = 4 * sizes.hidden + 2 * sizes.width + 2 * sizes.kv_width + 3 * sizes.intermediate
    return elements * compute_bytes


def activation_bytes(sizes: Sizes, work: Work, compute_bytes: int) -> int:
    each = layer_bytes(sizes, compute_bytes)
    if work.recomputes:
        gradients = 3 * sizes.intermediate  # of gate, up and their product
        return work.row_tokens * (compute_bytes * (sizes.layers * sizes.hidden + gradients) + each)
    return work.row_tokens * sizes.layers * each
