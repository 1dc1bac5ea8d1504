"""Devices by speed, memory and price, and how much of their peak each kind of work gets.

Known accelerators: peak bf16 products without sparsity, memory and bandwidth, by their makers' data sheets. The shares of
peak are assumptions there; on CPUs they are measured (`exact_speed.json`: an update of SmolLM2 gets 0.38 of a matrix
product's speed, a prefill 0.43; `learner_alone.json`, another CPU: 0.40; `validation_speed.json`: 0.56).
Called by `steps` and `shoal plan`. Left out: interconnects between the devices of one learner.
"""

import time
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    name: str
    flops: float  # of a large matrix product, per second
    bandwidth_Bps: float  # of its memory
    memory_bytes: float
    training: float = 0.4  # share of `flops` in training
    prefill: float = 0.5
    decode: float = 0.5  # of `flops`, for what many sequences at once compute
    reading: float = 0.7  # of `bandwidth_Bps`, in decoding and in the optimizer
    cpu: bool = False


KNOWN = {
    "a100": Device("a100", 312e12, 2.0e12, 80e9),
    "h100": Device("h100", 989e12, 3.35e12, 80e9),
    "h200": Device("h200", 989e12, 4.8e12, 141e9),
    "l40s": Device("l40s", 362e12, 0.864e12, 48e9),
    "rtx4090": Device("rtx4090", 165e12, 1.008e12, 24e9),
    "rtx3090": Device("rtx3090", 71e12, 0.936e12, 24e9),
}
CPU_DECODE = 0.1  # measured: 0.09 (1,327 GFLOP/s in products), 0.33 (505): small products of few rows
CPU_READING = 0.7


@dataclass(frozen=True)
class Fleet:
    """So many of one device, at a price."""

    device: Device
    count: int = 1
    price_per_h: float = 0.0  # of one


def measure(device: str = "cpu", *, size_bytes: int = 1 << 28) -> Device:
    """This machine: its faster dtype's matrix product, and the speed of reading memory. A second or two."""
    import os

    import torch

    from shoal.model.dtype import measure_gflops

    gflops = max(measure_gflops(getattr(torch, name), device) for name in ("float32", "bfloat16"))
    data = torch.ones(size_bytes // 4, device=device)
    best_s = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        data.sum().item()
        best_s = min(best_s, time.perf_counter() - start)
    if device == "cpu":
        memory: float = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        decode, reading = CPU_DECODE, CPU_READING
        return Device("this", gflops * 1e9, size_bytes / best_s, memory, decode=decode, reading=reading, cpu=True)
    return Device("this", gflops * 1e9, size_bytes / best_s, torch.cuda.get_device_properties(device).total_memory)
