"""How long a whole `shoal run` takes on this machine, and how much memory, from what its cores were measured to do.

    run = start + the first step, which hides nothing (`Pace.round_s`) + the others (`Pace.step_s`) + the last evaluation

The first evaluation goes on beside the steps. It and the last one each decode n completions greedily and n sampled ones.
Invariant: `estimate` is a pure function of numbers. Completions are taken to be as long as the config lets them be, unless
it sets targets. Left out: the first use of a model
on a machine, evaluations between the first and the last, tasks' rewards, other devices than CPUs.
"""

import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.cli.preflight import disk
from shoal.cli.preflight.machine import Finding, fails, ok
from shoal.cli.preflight.memory import memory_of
from shoal.cli.preflight.speed import Speed, pace, rollouts_s, speed
from shoal.cli.preflight.work import BUNDLED, COMPUTE_BYTES, Sizes, SizesError, Work, sizes_of, work_of
from shoal.config import Config
from shoal.model import sources
from shoal.tasks.prompt import prompt_tokens
from shoal.tasks.task import Task
from shoal.watch.figures import duration, memory

START_S = 35.0  # imports, processes, joining, loading the model: what whole runs took beyond the rest of the arithmetic
USEFUL = 0.55  # share of groups that teach, over a run that begins with few: 0.54 in the quickstart
TOO_LARGE = (
    "lower learner.row_tokens, set learner.activation_checkpointing = true or [learner.lora], or use a smaller model"
)
SAMPLE = 64  # prompts whose length is measured


@dataclass(frozen=True)
class Estimate:
    seconds: float  # of all that is left of the run
    steps: int  # that are left
    step_s: float
    bottleneck: str
    memory_bytes: float  # of all processes together
    machine_bytes: float
    dtype: str

    def time(self) -> str:
        return (
            f"about {duration(self.seconds)} in {self.dtype}: {self.steps} steps of {duration(self.step_s)}; "
            f"pace set by {self.bottleneck}"
        )

    def memory(self) -> str:
        return f"about {memory(round(self.memory_bytes))} of {memory(round(self.machine_bytes))}"


def estimate(
    config: Config,
    sizes: Sizes,
    machine: Speed,
    dtype: str,
    cores: int,
    *,
    prompt: int,
    steps: int,
    length: int | None = None,
    useful: float = USEFUL,
) -> Estimate:
    """Of `steps` more steps on this machine, whose cores all together are `machine`. `prompt`, `length`: tokens, mean."""
    work = work_of(config, prompt=prompt, length=length or expected_length(config), useful=useful)
    compute_bytes = COMPUTE_BYTES[dtype]
    found = pace(sizes, work, compute_bytes, config.coordinator.async_level, machine, shares(config, cores))
    evaluation_s = 2 * rollouts_s(sizes, evaluation(config, work), compute_bytes, machine)
    beside_s = evaluation_s if found.working_s >= found.paced_s else 0.0  # the first: cores that are busy do it as well
    counts = {"coordinator": 1, "origin": 1, "evaluator": 1, "learner": 1}
    counts |= {"relay": config.relays.count, "worker": config.workers.count, "validator": config.validator.count}
    return Estimate(
        seconds=START_S + beside_s + found.round_s + (steps - 1) * found.step_s + evaluation_s,
        steps=steps,
        step_s=found.step_s,
        bottleneck=found.bottleneck,
        memory_bytes=memory_of(sizes, work, compute_bytes).together(counts),
        machine_bytes=machine.memory_bytes,
        dtype=dtype,
    )


def of_measured(config: Config, measured: Mapping[str, Any], cores: int, *, trained: int = 0) -> Estimate | str:
    """The estimate, or why there is none. `trained`: steps of earlier legs. Raises ModelNotFoundError.

    `measured`: "machine" by `speed.measure`, "dtype" and "prompt_tokens".
    """
    not_covered = {
        "a GPU": config.model.device != "cpu",
        "adapters": config.learner.lora,
        "sites": config.learner.sites,
        "workers elsewhere": not config.workers.count,
    }
    if why := [what for what, there in not_covered.items() if there]:
        return f"not estimated for {' and '.join(why)}"
    try:
        sizes = model_sizes(config.model.name)
    except SizesError as error:
        return f"not estimated: {error}"
    machine, steps = speed(**measured["machine"], cores=cores), max(1, config.run.steps - trained)
    return estimate(config, sizes, machine, measured["dtype"], cores, prompt=measured["prompt_tokens"], steps=steps)


def outlook(
    config: Config, measured: Mapping[str, Any], cores: int, needs: disk.Needs, free_bytes: int, *, trained: int = 0
) -> tuple[Estimate | str, list[Finding]]:
    """Return the estimate, or why there is none, and what it says of time, memory and disk. Raises ModelNotFoundError."""
    found = of_measured(config, measured, cores, trained=trained)
    if isinstance(found, str):
        findings = [ok("time", found)]
    elif found.memory_bytes > found.machine_bytes:
        findings = [ok("time", found.time()), fails("memory", found.memory(), TOO_LARGE)]
    else:
        findings = [ok("time", found.time()), ok("memory", found.memory())]
    if free_bytes < needs.peak_bytes + disk.RESERVE_BYTES:
        findings.append(fails("disk", disk.said(needs, free_bytes), disk.KEEP_LESS))
    else:
        findings.append(ok("disk", disk.said(needs, free_bytes)))
    return found, findings


def model_sizes(name: str) -> Sizes:
    """Of a model by its name; of the hub's, config.json is fetched. Raises SizesError, ModelNotFoundError."""
    return BUNDLED[name] if name in BUNDLED else sizes_of(sources.read_config(name, fetch=True), name)


def mean_prompt(tokenizer: Any, config: Config, tasks: Iterable[Task]) -> int:
    """Tokens of a prompt, as the chat template makes it. Raises ChatTemplateError."""
    return round(statistics.fmean(len(prompt_tokens(tokenizer, config.tasks, task, 0)) for task in tasks))


def expected_length(config: Config) -> int:
    """Tokens of a completion: as many as are asked for, or allowed."""
    targets, most = config.tasks.targets, config.sampling.max_tokens
    return min(round(statistics.fmean(targets)), most) if targets else most


def evaluation(config: Config, work: Work) -> Work:
    """One pass over the held-out tasks, as rollouts: groups of one completion."""
    section = config.evaluator
    return replace(work, generated=section.n, completions=1, at_once=min(section.batch, section.n))


# --- cores -----------------------------------------------------------------------------------------------------------


def available_cores(wanted: int) -> int:
    """The number of cores to share: `wanted`, or all that this process may use if it is 0."""
    if wanted or not hasattr(os, "sched_getaffinity"):  # macOS has no such call
        return wanted or os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def share_threads(config: Config, cores: int) -> dict[str, int]:
    """Threads for each role that computes: at least one, and together at most `cores`, when possible.

    With async level 0, generating, checking and learning take turns, so each gets all cores. Sites share the learner's.
    The last evaluation has the machine to itself.
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


def shares(config: Config, cores: int) -> dict[str, float]:
    """The part of the cores that the processes of a role may use together, by what they do; it can be more than 1."""
    threads = share_threads(config, cores)
    found = {
        "learner": threads["learner"],
        "rollouts": threads["worker"] * config.workers.count,
        "validation": threads["validator"] * config.validator.count,
    }
    return {role: count / cores for role, count in found.items()}
