"""How long a whole `shoal run` takes on this machine, and how much memory, from what its cores were measured to do.

    run = start + the first step, which hides nothing (`Plan.round_s`) + the others (`Plan.step_s`) + the last evaluation

The first evaluation goes on beside the steps. It and the last one each decode n completions greedily and n sampled ones.
Invariant: pure functions of numbers. Completions are taken to be as long as the config lets them be, unless it sets targets.
Called by `shoal run` before it starts anything. Left out: the first use of a model on a machine, evaluations between the
first and the last, tasks' rewards, other devices than CPUs.
"""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.config import Config
from shoal.launch.cores import shares
from shoal.plan.devices import Device, Fleet, this_cpu
from shoal.plan.memory import memory_of
from shoal.plan.sizes import Sizes, SizesError, sizes_of
from shoal.plan.steps import Links, plan, rollouts_s
from shoal.plan.work import COMPUTE_BYTES, Work, work_of
from shoal.view.figures import duration, memory

START_S = 14.0  # imports, processes, joining, loading the model: `estimate.json`
USEFUL = 0.6  # share of groups that teach, over a run that begins with few


@dataclass(frozen=True)
class Estimate:
    seconds: float  # of all that is left of the run
    steps: int  # that are left
    step_s: float
    bottleneck: str
    memory_bytes: float  # of all processes together
    machine_bytes: float
    dtype: str

    def lines(self) -> list[str]:
        return [
            f"time: about {duration(self.seconds)} on this machine in {self.dtype}: {self.steps} steps of "
            f"{duration(self.step_s)}; what sets the pace: {self.bottleneck}",
            f"memory: about {memory(round(self.memory_bytes))} of {memory(round(self.machine_bytes))}",
        ]


def estimate(
    config: Config,
    sizes: Sizes,
    device: Device,
    dtype: str,
    cores: int,
    *,
    prompt: int,
    steps: int,
    length: int | None = None,
    useful: float = USEFUL,
) -> Estimate:
    """Of `steps` more steps on this machine, whose cores all together are `device`. `prompt`, `length`: tokens, mean."""
    work = work_of(config, prompt=prompt, length=length or expected_length(config), useful=useful)
    compute_bytes, level, fleet = COMPUTE_BYTES[dtype], config.coordinator.async_level, Fleet(device)
    found = plan(sizes, work, compute_bytes, level, fleet, fleet, fleet, Links(), shares=shares(config, cores))
    evaluation_s = 2 * rollouts_s(sizes, evaluation(config, work), compute_bytes, fleet)
    beside_s = evaluation_s if found.step_s == found.working_s else 0.0  # the first: cores that are busy do it as well
    counts = {"coordinator": 1, "origin": 1, "evaluator": 1, "learner": 1}
    counts |= {"relay": config.relays.count, "worker": config.workers.count, "validator": config.validator.count}
    return Estimate(
        seconds=START_S + beside_s + found.round_s + (steps - 1) * found.step_s + evaluation_s,
        steps=steps,
        step_s=found.step_s,
        bottleneck=found.bottleneck,
        memory_bytes=memory_of(sizes, work, compute_bytes).together(counts),
        machine_bytes=device.memory_bytes,
        dtype=dtype,
    )


def of_prepared(config: Config, prepared: Mapping[str, Any], cores: int, *, trained: int = 0) -> Estimate | str:
    """For what `prepare` found, or why there is no estimate. `trained`: steps of earlier legs."""
    not_covered = {
        "a GPU": config.model.device != "cpu",
        "adapters": config.learner.lora,
        "sites": config.learner.sites,
    }
    if why := [what for what, there in not_covered.items() if there]:
        return f"time and memory are not estimated for {' and '.join(why)}"
    try:
        sizes = sizes_of(json.loads((Path(prepared["folder"]) / "config.json").read_text()), config.model.name)
    except SizesError as error:
        return f"time and memory are not estimated: {error}"
    device = this_cpu(**prepared["machine"], cores=cores)
    steps = max(1, config.run.steps - trained)
    return estimate(config, sizes, device, prepared["dtype"], cores, prompt=prepared["prompt_tokens"], steps=steps)


def expected_length(config: Config) -> int:
    """Tokens of a completion: as many as are asked for, or allowed."""
    targets, most = config.tasks.targets, config.sampling.max_tokens
    return min(round(statistics.fmean(targets)), most) if targets else most


def evaluation(config: Config, work: Work) -> Work:
    """One pass over the held-out tasks, as rollouts: groups of one completion."""
    section = config.evaluator
    return replace(work, generated=section.n, completions=1, at_once=min(section.batch, section.n))
