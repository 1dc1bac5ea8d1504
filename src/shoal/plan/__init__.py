"""What a run would need and how fast it would be, before anything is bought: arithmetic on sizes, devices and links.

    sizes      a model's parameters, by the fields of its config.json
    work       what one step computes: trees of tokens, FLOPs, bytes
    devices    speed, memory and price; known ones, and this one, measured
    memory     bytes that each role holds
    steps      seconds of each role for one step, the async level, the bottleneck, the cost

Invariant: pure functions of numbers, except for `devices.measure`; each formula says what it leaves out.
Called by `shoal plan`. docs/operate.md compares it with measured runs.
"""

from shoal.plan.devices import KNOWN, Device, Fleet, measure
from shoal.plan.memory import Memory, memory_of
from shoal.plan.sizes import BUNDLED, Sizes, SizesError, sizes_of
from shoal.plan.steps import Links, Plan, plan
from shoal.plan.work import Work, work_of

__all__ = [
    "BUNDLED",
    "KNOWN",
    "Device",
    "Fleet",
    "Links",
    "Memory",
    "Plan",
    "Sizes",
    "SizesError",
    "Work",
    "measure",
    "memory_of",
    "plan",
    "sizes_of",
    "work_of",
]
