"""How long a whole `shoal run` takes on this machine, and how much memory, from what its cores were measured to do.

    run = start + steps + two evaluations, of which each decodes n completions greedily and n sampled ones

Invariant: `forecast` is a pure function of numbers. Completions are taken to be as long as the config lets them be, unless
it sets targets. Left out: the first use of a model on a machine, evaluations between the first and the last, tasks' rewards,
other devices than CPUs.
"""

import os
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.cli.preflight.cost import COMPUTE_BYTES, memory_of, rollouts_s, speed, step_seconds, together
from shoal.cli.preflight.machine import CheckLine, fails, ok
from shoal.cli.preflight.work import SizesError, Work, model_sizes, work_of
from shoal.config import Config
from shoal.config.sections import EVALUATED_AT_ONCE
from shoal.tasks.prompt import prompt_tokens
from shoal.tasks.task import Task
from shoal.watch.figures import duration, memory

START_S = 40.0  # imports, processes, joining, loading the model: what whole runs took beyond the rest of the arithmetic
USEFUL = 0.55  # share of groups that teach, over a run that begins with few: 0.54 in the quickstart
TOO_LARGE = (
    "lower learner.row_tokens, set learner.activation_checkpointing = true or [learner.lora], or use a smaller model"
)
SAMPLE = 64  # prompts whose length is measured


@dataclass(frozen=True)
class Forecast:
    seconds: float  # of all that is left of the run
    steps: int  # that are left
    step_s: float
    slowest: str  # role, which takes most of a step
    memory_bytes: float  # of all processes together
    machine_bytes: float
    dtype: str


def forecast(config: Config, measured: Mapping[str, Any], cores: int, *, trained: int = 0) -> Forecast | str:
    """Return the forecast, or why there is none. `trained`: steps of earlier legs. Raises ModelNotFoundError.

    `measured`: "machine" by `cost.measure`, "dtype" and "prompt_tokens".
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
    dtype, here, steps = measured["dtype"], measured["machine"], max(1, config.run.steps - trained)
    machine, compute_bytes = speed(here["flops"], here["bandwidth_Bps"], cores), COMPUTE_BYTES[dtype]
    work = work_of(config, prompt=measured["prompt_tokens"], length=expected_length(config), useful=USEFUL)
    seconds = step_seconds(sizes, work, compute_bytes, machine)
    step_s, evaluation_s = (
        sum(seconds.values()),
        2 * rollouts_s(sizes, evaluation(config, work), compute_bytes, machine),
    )
    return Forecast(
        seconds=START_S + steps * step_s + 2 * evaluation_s,
        steps=steps,
        step_s=step_s,
        slowest=max(seconds, key=lambda role: seconds[role]),
        memory_bytes=together(memory_of(sizes, work, compute_bytes), processes(config)),
        machine_bytes=here["memory_bytes"],
        dtype=dtype,
    )


def findings(found: Forecast | str) -> Iterator[CheckLine]:
    """What a forecast says of time and memory."""
    if isinstance(found, str):
        yield ok("time", found)
        return
    pace = f"{found.steps} steps of {duration(found.step_s)}, most of it {found.slowest}"
    yield ok("time", f"about {duration(found.seconds)} in {found.dtype}: {pace}")
    held = f"about {memory(round(found.memory_bytes))} of {memory(round(found.machine_bytes))}"
    yield ok("memory", held) if found.memory_bytes <= found.machine_bytes else fails("memory", held, TOO_LARGE)


def mean_prompt(tokenizer: Any, config: Config, tasks: Iterable[Task]) -> int:
    """Tokens of a prompt, as the chat template makes it. Raises ChatTemplateError."""
    return round(statistics.fmean(len(prompt_tokens(tokenizer, config.tasks, task, 0)) for task in tasks))


def expected_length(config: Config) -> int:
    """Tokens of a completion: as many as are asked for, or allowed."""
    targets, most = config.tasks.length_targets, config.sampling.max_tokens
    return min(round(statistics.fmean(targets)), most) if targets else most


def evaluation(config: Config, work: Work) -> Work:
    """One pass over the held-out tasks, as rollouts: groups of one completion."""
    n = config.evaluator.n
    return replace(work, generated=n, completions=1, at_once=min(EVALUATED_AT_ONCE, n))


# --- cores -----------------------------------------------------------------------------------------------------------


def available_cores() -> int:
    """The number of cores that this process may use: `taskset` leaves it fewer."""
    if not hasattr(os, "sched_getaffinity"):  # macOS has no such call
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def processes(config: Config) -> dict[str, int]:
    """How many processes of each role `shoal run` starts, at one site."""
    more = {"relay": config.relays.count, "worker": config.workers.count, "validator": config.validator.count}
    return {"coordinator": 1, "origin": 1, "evaluator": 1, "learner": 1} | more


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
