"""Devices by speed, memory and price, and how much of their peak each kind of work gets.

Known accelerators: peak bf16 products without sparsity, memory and bandwidth, by their makers' data sheets. The shares of
peak are assumptions there. On CPUs they follow from committed measurements of SmolLM2 on two-core machines, X with Intel's
AMX and E from AMD:

    training    0.40 X (`exact_speed.json`, 16 tokens), 0.47 E (`learner_alone.json`, 512 against 4,096 tokens)
    prefill     0.42 X (`exact_speed.json`), 0.46 E (`validation_speed.json`, of one thread's peak)
    attention   at 200 tokens 0.045 X (`exact_speed.json`: what an update takes more than at 16) and 0.05 E
                (`trl-completions.json`, likewise); 0.15 E at 4,096. Its scores are float32, and its backward pass is slow
                over short segments
    decode      0.09 X (`exact_speed.json`, two threads), 0.34 E (`validation_speed.json`, one thread, of its peak): the
                vocabulary's noise and logprobs are most of it, and gain nothing from faster products
    reading     the weights at each position: 8.6 GB/s X, 10.3 GB/s a thread E (`validation_speed.json`)

Of any other CPU the peak is measured. Training and prefill are its products at 0.9 of that, plus what is around them, which
takes the same time whatever the peak: 950 GFLOP/s on both cores gives X 0.40 and E 0.475. Attention, in float32, gets 30
GFLOP/s a core on X and 24 on E. Decoding 64 sequences gets 85 a core on an EPYC with half of E's peak (`vllm_speed.json`).

What a learner offloads travels over PCIe and is computed at the speed of the host's memory. `pcie_Bps` is one direction of
16 lanes: half of the 64 GB/s that data sheets give for the fourth generation, and of the 128 GB/s for the fifth. `host_Bps`
is a device's share of its host's memory: an eighth of two processors with eight channels (DDR4-3200 in DGX A100, DDR5-4800
in DGX H100), or a desktop's two channels of DDR4-3200. PINNED and PAGEABLE: 5.8 and 2.3 of 8 GB/s in a laptop
(developer.nvidia.com/blog/how-optimize-data-transfers-cuda-cc).

Called by `steps` and `shoal plan`. Left out: interconnects between the devices of one learner.
"""

import time
from dataclasses import dataclass

GIB = 1 << 30
PRODUCTS = 0.9  # share of peak of a CPU's products in training and prefill
AROUND = 475e9  # FLOP/s of products that would take as long as what is around them does on one core
ATTENTION, DECODE = 27e9, 85e9  # FLOP/s of one core
PINNED, PAGEABLE = 0.7, 0.3  # shares of `pcie_Bps`, by the kind of the host's memory


@dataclass(frozen=True)
class Device:
    name: str
    flops: float  # of a large matrix product, per second
    bandwidth_Bps: float  # of its memory
    memory_bytes: float
    training: float = 0.4  # share of `flops` in training, without attention
    prefill: float = 0.5  # also without
    attention: float = 0.3  # both passes of it
    decode: float = 0.5  # of `flops`, for what many sequences at once compute
    reading: float = 0.7  # of `bandwidth_Bps`, in decoding and in the optimizer
    cpu: bool = False
    pcie_Bps: float = 32e9  # between it and its host, one way
    host_Bps: float = 51e9  # its share of the host's memory bandwidth


KNOWN = {
    "a100": Device("a100", 312e12, 2.0e12, 80e9),
    "h100": Device("h100", 989e12, 3.35e12, 80e9, pcie_Bps=64e9, host_Bps=77e9),
    "h200": Device("h200", 989e12, 4.8e12, 141e9, pcie_Bps=64e9, host_Bps=77e9),
    "l40s": Device("l40s", 362e12, 0.864e12, 48e9),
    "rtx4090": Device("rtx4090", 165e12, 1.008e12, 24e9),
    "rtx3090": Device("rtx3090", 71e12, 0.936e12, 24e9),
}


@dataclass(frozen=True)
class Fleet:
    """So many of one device, at a price."""

    device: Device
    count: int = 1
    price_per_h: float = 0.0  # of one


def this_cpu(flops: float, bandwidth_Bps: float, memory_bytes: float, cores: int) -> Device:
    """This machine, by what all its cores together measure. `flops` differ more between CPUs than the work around them."""
    dense = 1 / (1 / PRODUCTS + flops / (AROUND * cores))
    return Device(
        "this",
        flops,
        bandwidth_Bps,
        memory_bytes,
        training=dense,
        prefill=dense,
        attention=ATTENTION * cores / flops,
        decode=DECODE * cores / flops,
        reading=0.7,
        cpu=True,
    )


def measure(dtype: str = "", device: str = "cpu", *, size_bytes: int = 1 << 28) -> Device:
    """This machine: the matrix product of `dtype` (the faster one's if none), and the speed of reading memory.

    A second or two.
    """
    import os

    import torch

    from shoal.model.dtype import measure_gflops

    names = [dtype] if dtype else ["float32", "bfloat16"]
    gflops = max(measure_gflops(getattr(torch, name), device) for name in names)
    data = torch.ones(size_bytes // 4, device=device)
    best_s = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        data.sum().item()
        best_s = min(best_s, time.perf_counter() - start)
    if device == "cpu":
        memory: float = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return this_cpu(gflops * 1e9, size_bytes / best_s, memory, torch.get_num_threads())
    return Device("this", gflops * 1e9, size_bytes / best_s, torch.cuda.get_device_properties(device).total_memory)
