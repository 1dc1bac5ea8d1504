"""Seconds of each role for one step, what hides what, and what it costs.

    learner     passes x (dense FLOPs / (devices x flops x training) + attention's / (devices x flops x attention))
                + updates x 28 and rows x 14 bytes a parameter / (devices x bandwidth x reading): AdamW reads and writes its
                state, and each row's gradients are added to those of the rows before
                + the version's bytes / WRITE_BPS
                offloaded, the 28 and 14 bytes are moved in the host's memory, and bytes cross PCIe, as if nothing
                overlapped: on one device each row's gradients, 2 a parameter, and each update's weights, 2; on several,
                for each row of a device, its shard's masters twice and its gradients, 4 each
    rollouts    rounds of `at_once` completions: weights are read until the longest has ended; each token reads its cache and
                computes 2 FLOPs a parameter. Both add up, as on a CPU; with perfect overlap the larger would count. Plus
                prompts' prefill.
    validation  (dense FLOPs / prefill + attention's / attention) x generated / (devices x flops)
    broadcast   bytes x 8 / the slowest of: origin's upload, which sends each shard to one relay; relays' uploads, shared by
                workers and the other relays; a worker's download. Shards are passed on while they arrive, so hops do not
                add up. On one machine: LOCAL_S + bytes / LOCAL_BPS x crowd, the processes that compute for each core

With async level A, batch s + 1 + A may use version s + 1, so A + 1 steps are in flight (Little's law):

    step(A) = max( learner, rollouts, validation, broadcast, (their sum) / (A + 1) )

Where all share one machine, a role with a part of its cores takes as much longer, and the machine does all of the work:

    step(A) = max( role / share, (their sum of role / share) / (A + 1), sum of role )

COORDINATION_S is what remains of a step with hardly any products: heartbeats, uploads, Parquet, fsync, checkpoints
(runs of tiny, `plan.json`: 1.0 s, products 0.2 s).
Invariant: other numbers come from `Device`, `Links` or a formula above. Left out: stragglers, tasks' rewards, start-up.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.plan.devices import PAGEABLE, PINNED, Fleet
from shoal.plan.sizes import Sizes
from shoal.plan.work import Work, attention_flops, cache_bytes_per_token, dense_flops, passes, version_bytes

ADAMW_BYTES = 28  # per parameter: reads 4 + 8 + 2, writes 4 + 8 + 2
ROW_BYTES = 14  # per parameter: reads a bf16 gradient, 2, writes it as float32, 4, reads and writes the sum, 8
WRITE_BPS = 0.55e9  # a version to disk, as bf16, synced: `update_latency.json`, 273 MB in 0.50 s
LOCAL_BPS = 0.4e9  # from origin over relay to client, as a delta, on a busy machine: `plan.json`, 1.5 and 1.8 s
LOCAL_S = 0.5  # until a client has heard of a version: polls of 0.1 to 1 s on the way (`plan.json`, tiny)
COORDINATION_S = 0.85
HOUR_S = 3600.0


@dataclass(frozen=True)
class Links:
    """Bits per second. None: on one machine, nothing to send."""

    origin_up_bps: float | None = None
    relay_up_bps: float | None = None  # of each relay; None: not the slowest
    worker_down_bps: float | None = None
    relays: int = 1
    delta: float = 1.0  # share of a version that travels: 1 is all of it, about 0.02 a delta of SmolLM2


@dataclass(frozen=True)
class Plan:
    seconds: dict[str, float]  # of each role alone, for one step
    together: bool  # on one machine
    async_level: int
    price_per_h: float
    shares: Mapping[str, float] = field(default_factory=dict)  # of the machine, if together; not named: all of it

    @property
    def round_s(self) -> float:
        """From the start of training on a batch to the verdicts on rollouts of the version that it made."""
        return sum(self.seconds.values())

    @property
    def step_s(self) -> float:
        paced_s = max(*self.seconds.values(), self.round_s / (self.async_level + 1))
        return max(paced_s, self.working_s) if self.together else paced_s

    @property
    def working_s(self) -> float:
        """Of a machine that does everything, with all its cores."""
        return sum(seconds * self.shares.get(role, 1.0) for role, seconds in self.seconds.items())

    @property
    def hiding_level(self) -> int:
        """The smallest async level at which the slowest role alone sets the pace."""
        return math.ceil(self.round_s / max(self.seconds.values()) - 1e-9) - 1

    @property
    def bottleneck(self) -> str:
        slowest = max(self.seconds, key=lambda role: self.seconds[role])
        if self.together and self.working_s >= max(self.seconds[slowest], self.round_s / (self.async_level + 1)):
            return "this machine's cores: all of them work all the time"
        if self.async_level >= self.hiding_level:
            return slowest
        return f"waiting: async level {self.async_level} hides too little, {self.hiding_level} would"

    @property
    def step_cost(self) -> float:
        return self.price_per_h * self.step_s / HOUR_S

    def busy(self, role: str) -> float:
        """Share of the step in which it works."""
        return self.seconds[role] / self.step_s


def plan(
    sizes: Sizes,
    work: Work,
    compute_bytes: int,
    async_level: int,
    learner: Fleet,
    workers: Fleet,
    validators: Fleet,
    links: Links,
    *,
    shares: Mapping[str, float] | None = None,
) -> Plan:
    """`shares`: all roles run on one machine, which the first fleet describes; each may use this part of its cores.

    A role's part is the sum over its processes, so it can exceed 1.
    """
    together = shares is not None
    price = sum(fleet.count * fleet.price_per_h for fleet in (learner, workers, validators))
    crowd = max(1.0, sum((shares or {}).values()))
    seconds = {
        "learner": learner_s(sizes, work, learner),
        "rollouts": rollouts_s(sizes, work, compute_bytes, workers),
        "validation": validation_s(sizes, work, validators),
        "broadcast": local_s(sizes, crowd) if together else broadcast_s(version_bytes(sizes), links, workers.count),
        "coordination": COORDINATION_S,
    }
    own = {role: min(1.0, share) for role, share in (shares or {}).items()}
    alone = {role: took_s / own.get(role, 1.0) for role, took_s in seconds.items()}
    if together:  # waiting, for news or for a core, takes no core
        own["broadcast"] = version_bytes(sizes) / LOCAL_BPS / seconds["broadcast"]
    return Plan(alone, together, async_level, price, own)


def learner_s(sizes: Sizes, work: Work, fleet: Fleet) -> float:
    device = fleet.device
    forward_s = dense_flops(sizes, work) / device.training + attention_flops(sizes, work) / device.attention
    computing_s = passes(work) * work.trained * forward_s / (fleet.count * device.flops)
    moved = work.updates * (ADAMW_BYTES + work.rows * ROW_BYTES) * sizes.parameters
    bandwidth_Bps = device.host_Bps if work.offloads and not device.cpu else device.bandwidth_Bps
    moving_s = moved / (fleet.count * bandwidth_Bps * device.reading)
    return computing_s + moving_s + crossing_s(sizes, work, fleet) + version_bytes(sizes) / WRITE_BPS


def crossing_s(sizes: Sizes, work: Work, fleet: Fleet) -> float:
    """Of what the learner offloads, between its devices and their hosts."""
    if not work.offloads or fleet.device.cpu:
        return 0.0
    if fleet.count == 1:
        each, share = 2 * work.rows + 2, PAGEABLE
    else:
        each, share = 3 * 4 * math.ceil(work.rows / fleet.count), PINNED
    return work.updates * each * sizes.parameters / (fleet.count * fleet.device.pcie_Bps * share)


def rollouts_s(sizes: Sizes, work: Work, compute_bytes: int, fleet: Fleet) -> float:
    device = fleet.device
    completions = work.generated * work.completions
    middle = work.prompt + work.length / 2  # tokens in the cache, on the average
    weights = completions / work.at_once * work.longest * compute_bytes * sizes.parameters
    caches = completions * work.length * middle * cache_bytes_per_token(sizes, compute_bytes)
    reading_s = (weights + caches) / (device.bandwidth_Bps * device.reading)
    computing_s = 2.0 * sizes.parameters * completions * work.length / (device.flops * device.decode)
    prompts_s = 2.0 * sizes.body * work.prompt * work.generated / (device.flops * device.prefill)
    return (reading_s + computing_s + prompts_s) / fleet.count


def validation_s(sizes: Sizes, work: Work, fleet: Fleet) -> float:
    device = fleet.device
    forward_s = dense_flops(sizes, work) / device.prefill + attention_flops(sizes, work) / device.attention
    return forward_s * work.generated / (fleet.count * device.flops)


def local_s(sizes: Sizes, crowd: float) -> float:
    """Until the last node of one machine has a version, whose cores so many processes each want."""
    return LOCAL_S + crowd * version_bytes(sizes) / LOCAL_BPS


def broadcast_s(size_bytes: float, links: Links, workers: int) -> float:
    rates = [
        links.origin_up_bps or math.inf,
        links.relay_up_bps * links.relays / (workers + links.relays - 1) if links.relay_up_bps else math.inf,
        links.worker_down_bps or math.inf,
    ]
    return 8 * size_bytes * links.delta / min(rates)
