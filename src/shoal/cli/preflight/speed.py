"""How fast this machine computes, and from that the seconds of each role for one step when it runs all of them.

A CPU's matrix product and memory are measured (`measure`); how much of its peak each kind of work gets follows from
committed measurements of SmolLM2 on two-core machines, X with Intel's AMX and E from AMD:

    training    0.40 X (`exact_speed.json`, 16 tokens), 0.47 E (`learner_alone.json`, 512 against 4,096 tokens)
    prefill     0.42 X (`exact_speed.json`), 0.46 E (`validation_speed.json`, of one thread's peak)
    attention   at 200 tokens 0.045 X (`exact_speed.json`: what an update takes more than at 16) and 0.05 E
                (`trl-completions.json`, likewise); 0.15 E at 4,096. Its scores are float32, and its backward pass is slow
                over short segments
    decode      0.09 X (`exact_speed.json`, two threads), 0.34 E (`validation_speed.json`, one thread, of its peak): the
                vocabulary's noise and logprobs are most of it, and gain nothing from faster products
    reading     the weights at each position: 8.6 GB/s X, 10.3 GB/s a thread E (`validation_speed.json`)

Training and prefill are products at 0.9 of the measured peak, plus what is around them, which takes the same time whatever
the peak: 950 GFLOP/s on both cores gives X 0.40 and E 0.475. Attention, in float32, gets 30 GFLOP/s a core on X and 24 on E.
Decoding 64 sequences gets 85 a core on an EPYC with half of E's peak (`vllm_speed.json`).

    learner     passes x (dense FLOPs / (flops x training) + attention's / (flops x attention)) + updates x 28 and rows x 14
                bytes a parameter / (bandwidth x reading): AdamW reads and writes its state, and each row's gradients are
                added to those of the rows before; + the version's bytes / WRITE_BPS
    rollouts    rounds of `at_once` completions: weights are read until the longest has ended; each token reads its cache and
                computes 2 FLOPs a parameter. Both add up, as on a CPU. Plus prompts' prefill.
    validation  (dense FLOPs / prefill + attention's / attention) x generated / flops
    broadcast   LOCAL_S + bytes / LOCAL_BPS x crowd, the processes that compute for each core

With async level A, batch s + 1 + A may use version s + 1, so A + 1 steps are in flight (Little's law). A role with a part of
the cores takes as much longer, and the machine does all of the work:

    step(A) = max( role / share, (sum of role / share) / (A + 1), sum of role )

COORDINATION_S is what remains of a step with hardly any products: heartbeats, uploads, Parquet, fsync, checkpoints
(runs of tiny, `plan.json`: 1.0 s, products 0.2 s).
Invariant: pure functions of numbers, except for `measure`. Left out: stragglers, tasks' rewards,
start-up, GPUs.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.cli.preflight.machine import memory_bytes
from shoal.cli.preflight.work import (
    Sizes,
    Work,
    attention_flops,
    cache_bytes_per_token,
    dense_flops,
    passes,
    version_bytes,
)

PRODUCTS = 0.9  # share of peak of a CPU's products in training and prefill
AROUND = 475e9  # FLOP/s of products that would take as long as what is around them does on one core
ATTENTION, DECODE = 27e9, 85e9  # FLOP/s of one core
READING = 0.7  # of the measured bandwidth, in decoding and in the optimizer
ADAMW_BYTES = 28  # per parameter: reads 4 + 8 + 2, writes 4 + 8 + 2
ROW_BYTES = 14  # per parameter: reads a bf16 gradient, 2, writes it as float32, 4, reads and writes the sum, 8
WRITE_BPS = 0.55e9  # a version to disk, as bf16, synced: `update_latency.json`, 273 MB in 0.50 s
LOCAL_BPS = 0.4e9  # from origin over relay to client, as a delta, on a busy machine: `plan.json`, 1.5 and 1.8 s
LOCAL_S = 0.5  # until a client has heard of a version: polls of 0.1 to 1 s on the way (`plan.json`, tiny)
COORDINATION_S = 0.85
MEASURE_S = 1.0


@dataclass(frozen=True)
class Speed:
    """Of all cores together."""

    flops: float  # of a large matrix product, per second
    bandwidth_Bps: float  # of its memory
    memory_bytes: float
    training: float = 0.4  # share of `flops` in training, without attention
    prefill: float = 0.5  # also without
    attention: float = 0.3  # both passes of it
    decode: float = 0.5  # of `flops`, for what many sequences at once compute
    reading: float = READING


def speed(flops: float, bandwidth_Bps: float, memory_bytes: float, cores: int) -> Speed:
    """By what all cores together measure. `flops` differ more between CPUs than the work around them."""
    dense = 1 / (1 / PRODUCTS + flops / (AROUND * cores))
    attention, decode = ATTENTION * cores / flops, DECODE * cores / flops
    return Speed(flops, bandwidth_Bps, memory_bytes, dense, dense, attention, decode)


def measure(dtype: str, device: str = "cpu", *, size_bytes: int = 1 << 28) -> dict[str, float]:
    """The arguments of `speed`: this machine's matrix product in `dtype`, and its reading of memory.

    The best of MEASURE_S seconds, since other processes only slow it.
    """
    import torch

    from shoal.model.dtype import measure_gflops

    data = torch.ones(size_bytes // 4, device=device)
    gflops, best_s, ends_s = 0.0, float("inf"), time.perf_counter() + MEASURE_S
    while time.perf_counter() < ends_s:
        gflops = max(gflops, measure_gflops(getattr(torch, dtype), device))
        start_s = time.perf_counter()
        data.sum().item()
        best_s = min(best_s, time.perf_counter() - start_s)
    return {"flops": gflops * 1e9, "bandwidth_Bps": size_bytes / best_s, "memory_bytes": float(memory_bytes())}


@dataclass(frozen=True)
class Pace:
    seconds: Mapping[str, float]  # of each role with its share of the cores, for one step
    async_level: int
    shares: Mapping[str, float]  # of the machine; not named: all of it

    @property
    def round_s(self) -> float:
        """From the start of training on a batch to the verdicts on rollouts of the version that it made."""
        return sum(self.seconds.values())

    @property
    def paced_s(self) -> float:
        return max(*self.seconds.values(), self.round_s / (self.async_level + 1))

    @property
    def working_s(self) -> float:
        """Of the machine, with all its cores."""
        return sum(seconds * self.shares.get(role, 1.0) for role, seconds in self.seconds.items())

    @property
    def step_s(self) -> float:
        return max(self.paced_s, self.working_s)

    @property
    def bottleneck(self) -> str:
        if self.working_s >= self.paced_s:
            return "all cores"
        slowest = max(self.seconds, key=lambda role: self.seconds[role])
        if self.paced_s == self.seconds[slowest]:
            return slowest
        return f"waiting (async level {self.async_level})"


def pace(
    sizes: Sizes, work: Work, compute_bytes: int, async_level: int, machine: Speed, shares: Mapping[str, float]
) -> Pace:
    """`shares`: the part of the cores that each role may use. It is the sum over its processes, so it can exceed 1."""
    crowd = max(1.0, sum(shares.values()))
    seconds = {
        "learner": learner_s(sizes, work, machine),
        "rollouts": rollouts_s(sizes, work, compute_bytes, machine),
        "validation": validation_s(sizes, work, machine),
        "broadcast": LOCAL_S + crowd * version_bytes(sizes) / LOCAL_BPS,
        "coordination": COORDINATION_S,
    }
    own = {role: min(1.0, share) for role, share in shares.items()}
    alone = {role: took_s / own.get(role, 1.0) for role, took_s in seconds.items()}
    own["broadcast"] = version_bytes(sizes) / LOCAL_BPS / seconds["broadcast"]  # waiting takes no core
    return Pace(alone, async_level, own)


def learner_s(sizes: Sizes, work: Work, machine: Speed) -> float:
    forward_s = dense_flops(sizes, work) / machine.training + attention_flops(sizes, work) / machine.attention
    computing_s = passes(work) * work.trained * forward_s / machine.flops
    moved = work.updates * (ADAMW_BYTES + work.rows * ROW_BYTES) * sizes.parameters
    return computing_s + moved / (machine.bandwidth_Bps * machine.reading) + version_bytes(sizes) / WRITE_BPS


def rollouts_s(sizes: Sizes, work: Work, compute_bytes: int, machine: Speed) -> float:
    completions = work.generated * work.completions
    middle = work.prompt + work.length / 2  # tokens in the cache, on the average
    weights = completions / work.at_once * work.longest * compute_bytes * sizes.parameters
    caches = completions * work.length * middle * cache_bytes_per_token(sizes, compute_bytes)
    reading_s = (weights + caches) / (machine.bandwidth_Bps * machine.reading)
    computing_s = 2.0 * sizes.parameters * completions * work.length / (machine.flops * machine.decode)
    prompts_s = 2.0 * sizes.body * work.prompt * work.generated / (machine.flops * machine.prefill)
    return reading_s + computing_s + prompts_s


def validation_s(sizes: Sizes, work: Work, machine: Speed) -> float:
    forward_s = dense_flops(sizes, work) / machine.prefill + attention_flops(sizes, work) / machine.attention
    return forward_s * work.generated / machine.flops
