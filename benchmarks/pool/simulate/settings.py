"""The simulated pools: the paper's 32B run, and larger ones.

The paper (arXiv 2505.07291) reports 256 prompts x 16 completions per step, async level 2, and versions of 62 GB that took
about 14 minutes to arrive (590 Mb/s). The other constants below are assumptions.
"""

import random
from dataclasses import dataclass, replace

from benchmarks.pool.simulate.pool import Rig, Setting

VERSION_BITS = 62e9 * 8
LINK_BPS = 590e6
WORKERS = 10  # for example, machines with eight GPUs each
TRAIN_S = 21 * 60.0
GENERATE_S = 21 * 60.0  # for WORKERS workers to generate a batch
VALIDATE_S = 15 * 60.0  # for all validators to check a batch
BATCH, USEFUL = 256, 0.5
RIG_GROUPS = 4
UPLOAD_BITS = 4 * 16 * 8_000 * 18 * 8  # a submission: groups x completions x tokens x bytes x 8
UP_BPS = 50e6
LOAD_S = 60.0
# A pool simulates STEP_WORKERS / workers steps, within the two limits. Large pools get few steps, because each has many
# events.
MOST_STEPS, FEWEST_STEPS, STEP_WORKERS = 24, 6, 12_000
SIZES = (10, 100, 1_000, 10_000)


@dataclass(frozen=True)
class Case:
    name: str
    workers: int
    async_level: int
    setting: Setting


def rig(draw: random.Random, spread: float, relays_bps: float, workers: int) -> Rig:
    """Return a worker whose speed and link each differ from the mean by a random factor of up to `spread` (log-uniform)."""
    speed, link = (spread ** draw.uniform(-1, 1) for _ in range(2))
    group_s = GENERATE_S * WORKERS / (BATCH / USEFUL) / speed
    down_bps = min(LINK_BPS * link, relays_bps / workers)
    return Rig(
        group_s=group_s,
        groups=RIG_GROUPS,
        start_s=10.0,
        upload_s=UPLOAD_BITS / (UP_BPS * link),
        fetch_s=VERSION_BITS / down_bps,
        load_s=LOAD_S,
    )


def pool(workers: int, async_level: int, *, grows: bool, spread: float = 1.0, relays: int = 0) -> Setting:
    """Return the setting of a pool with this many workers.

    With `grows`, batch, learner and validators grow in proportion to the workers beyond WORKERS. The larger learner trains
    the larger batch in the same time. `relays` is the number of relays, and each sends 10 Gb/s in all. 0 means as many
    relays as are needed.
    """
    draw = random.Random(workers)
    factor = max(workers // WORKERS, 1) if grows else 1
    validators = 8 * factor
    return Setting(
        steps=max(FEWEST_STEPS, min(MOST_STEPS, STEP_WORKERS // workers)),
        async_level=async_level,
        batch=BATCH * factor,
        rigs=[rig(draw, spread, relays * 10e9 or float("inf"), workers) for _ in range(workers)],
        validators=validators,
        validate_s=VALIDATE_S * validators / (BATCH * factor / USEFUL),
        validate_start_s=1.0,
        train_s=TRAIN_S,
        publish_s=30.0,
        useful=USEFUL,
        spread=0.1,
    )


def without_network(setting: Setting) -> Setting:
    """Return the same pool, in which versions arrive at once."""
    return replace(setting, publish_s=0.0, rigs=[replace(one, fetch_s=0.0, load_s=0.0) for one in setting.rigs])


def cases() -> list[Case]:
    result = []
    for level in (0, 1, 2, 4):
        setting = pool(WORKERS, level, grows=False)
        result.append(Case("paper", WORKERS, level, setting))
        result.append(Case("paper, versions arrive at once", WORKERS, level, without_network(setting)))
    for workers in SIZES:
        for level in (1, 2, 4):
            result += [
                Case("grows", workers, level, pool(workers, level, grows=True)),
                Case("grows, mixed", workers, level, pool(workers, level, grows=True, spread=3.0)),
                Case("grows, mixed, 8 relays", workers, level, pool(workers, level, grows=True, spread=3.0, relays=8)),
                Case("same batch", workers, level, pool(workers, level, grows=False)),
            ]
    return result
