"""Seconds of each role for one step, what hides what, and what it costs.

    learner     training_flops / (devices x flops x training)
                + updates x 28 bytes a parameter / (devices x bandwidth x reading): AdamW reads and writes its state
    rollouts    rounds of `at_once` completions, each `length` times: read weights and cache, compute 2 FLOPs a parameter and
                completion. Both add up, as on a CPU; with perfect overlap the larger would count. Plus prompts' prefill.
    validation  forward_flops x generated / (devices x flops x prefill)
    broadcast   bytes x 8 / the slowest of: origin's upload, which sends each shard to one relay; relays' uploads, shared by
                workers and the other relays; a worker's download. Shards are passed on while they arrive, so hops do not
                add up.

With async level A, batch s + 1 + A may use version s + 1, so A + 1 steps are in flight (Little's law):

    step(A) = max( learner, rollouts, validation, broadcast, (their sum) / (A + 1) )

Where all share one machine, their times add up instead: the machine does all of it. COORDINATION_S is what remains of a step
with hardly any products: heartbeats, uploads, Parquet, fsync, checkpoints (`tiny-exact.json`: 1.3 s, products 0.2 s).
Invariant: other numbers come from `Device`, `Links` or a formula above. Left out: stragglers, tasks' rewards, start-up.
"""

import math
from dataclasses import dataclass

from shoal.plan.devices import Fleet
from shoal.plan.sizes import Sizes
from shoal.plan.work import Work, cache_bytes_per_token, forward_flops, training_flops, version_bytes

ADAMW_BYTES = 28  # per parameter: reads 4 + 8 + 2, writes 4 + 8 + 2
COORDINATION_S = 1.1
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

    @property
    def round_s(self) -> float:
        """From the start of training on a batch to the verdicts on rollouts of the version that it made."""
        return sum(self.seconds.values())

    @property
    def step_s(self) -> float:
        if self.together:
            return self.round_s
        return max(*self.seconds.values(), self.round_s / (self.async_level + 1))

    @property
    def hiding_level(self) -> int:
        """The smallest async level at which the slowest role alone sets the pace."""
        return math.ceil(self.round_s / max(self.seconds.values()) - 1e-9) - 1

    @property
    def bottleneck(self) -> str:
        slowest = max(self.seconds, key=lambda role: self.seconds[role])
        if self.together or self.async_level >= self.hiding_level:
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
    together: bool = False,
) -> Plan:
    price = sum(fleet.count * fleet.price_per_h for fleet in (learner, workers, validators))
    seconds = {
        "learner": learner_s(sizes, work, learner),
        "rollouts": rollouts_s(sizes, work, compute_bytes, workers),
        "validation": validation_s(sizes, work, validators),
        "broadcast": broadcast_s(version_bytes(sizes), links, workers.count),
        "coordination": COORDINATION_S,
    }
    return Plan(seconds, together, async_level, price)


def learner_s(sizes: Sizes, work: Work, fleet: Fleet) -> float:
    device = fleet.device
    computing_s = training_flops(sizes, work) / (fleet.count * device.flops * device.training)
    moved = work.updates * ADAMW_BYTES * sizes.parameters
    return computing_s + moved / (fleet.count * device.bandwidth_Bps * device.reading)


def rollouts_s(sizes: Sizes, work: Work, compute_bytes: int, fleet: Fleet) -> float:
    device = fleet.device
    rounds = work.generated * work.completions / work.at_once
    middle = work.prompt + work.length / 2  # tokens in the cache, on the average
    read = compute_bytes * sizes.parameters + work.at_once * middle * cache_bytes_per_token(sizes, compute_bytes)
    reading_s = read / (device.bandwidth_Bps * device.reading)
    computing_s = 2.0 * sizes.parameters * work.at_once / (device.flops * device.decode)
    prompts_s = 2.0 * sizes.body * work.prompt * work.generated / (device.flops * device.prefill)
    return (rounds * work.length * (reading_s + computing_s) + prompts_s) / fleet.count


def validation_s(sizes: Sizes, work: Work, fleet: Fleet) -> float:
    device = fleet.device
    return forward_flops(sizes, work) * work.generated / (fleet.count * device.flops * device.prefill)


def broadcast_s(size_bytes: float, links: Links, workers: int) -> float:
    rates = [
        links.origin_up_bps or math.inf,
        links.relay_up_bps * links.relays / (workers + links.relays - 1) if links.relay_up_bps else math.inf,
        links.worker_down_bps or math.inf,
    ]
    return 8 * size_bytes * links.delta / min(rates)
