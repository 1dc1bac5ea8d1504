"""Calibrate the validator: measure honest work on this machine, and derive limits from it.

Machines with different numerics, for example different dtypes or devices, compute slightly different logits. So their
proofs differ slightly, and so do some tokens. Calibration generates work under each worker condition, and judges it under
each validator condition. Submissions alternate between the configured size and one group. A statistic's limit is its worst
honest value times a margin.
The limits apply outside a validator's exactness class, so they are measured with fast numerics. Within a class, the
tolerance is zero.

    limits.toml     [validator] limits and [evidence] bounds, for `--with`
    measured.json   the figures of every submission, by condition; the figures behind the bounds, by pair of numerics
    work/           the submissions and how they were made, to be judged on another machine (`--work`)

Each engine of `workers.engines` is measured. vLLM's limits go to `[validator.limits."vllm/DEVICE"]`.

The bounds apply to averages over all of a worker's submissions, so they are far below the limits. Each bound comes from
the noisiest pair of a worker and a validator, and applies to every worker. To admit only a less noisy dtype, set
`model.dtype` and calibrate again.

Measure both the initial policy, whose logprobs differ most because it is least certain, and a trained one. Measure on
each kind of machine that will join, let each judge the others' work, too, and use the widest limits. Whatever is in
another machine's folder counts as honest and widens the limits.
"""

import itertools
import json
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.config import Config, EngineName
from shoal.config.recipe import SamplingSection
from shoal.config.sections import ROW_TOKENS
from shoal.engine.protocol import Completion, Engine
from shoal.engine.torch_engine import TorchEngine
from shoal.engine.vllm.client import VllmEngine
from shoal.errors import ShoalError, UserError, first_line, first_problem
from shoal.files import discard, write_file
from shoal.model.dtype import DtypeName, check_device, measure_gflops, use_threads
from shoal.model.load import weights_digest
from shoal.model.sources import resolve
from shoal.protocol.identity import Identity
from shoal.protocol.messages import BEYOND, Assignment
from shoal.store.columns import RolloutFileError
from shoal.store.quarantine import Quarantine
from shoal.store.rollouts import Header
from shoal.tasks.derive import GroupPlan, max_rollouts
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Finding
from shoal.validator.checks import EXPENSIVE, computed_fault
from shoal.validator.judge import Judge
from shoal.validator.spending import spent
from shoal.worker.produce import Producer

RUN = "calibration"
WORK, CONDITION = "work", "worker.json"  # a folder in `out`; a file in each of its folders
MARGIN = 1.5  # a limit is this times the worst honest value, and at least the floor in LIMITS
TAIL_MARGIN = 3.0  # factor for the mean margin; it is larger, because a few rare tokens can dominate that mean
LIMITS = {  # statistic -> (limit's name in [validator], floor, margin)
    "proof_exponent_mean": ("proof_exponent_mean", 4.0, MARGIN),
    "proof_mantissa_mean": ("proof_mantissa_mean", 0.5, MARGIN),
    "logprob_error_mean": ("logprob_error_mean", 0.02, MARGIN),
    "margin_max": ("sampling_margin", 0.75, MARGIN),
    "margin_mean": ("sampling_margin_mean", 0.005, TAIL_MARGIN),
}
RATE_MARGIN = 3.0  # factor for [evidence] rates; one is added to each number of misses first, because it may be 0
AVERAGES = ("proof_exponent_mean", "proof_mantissa_mean", "logprob_error_mean")  # in both LIMITS and [evidence]


@dataclass(frozen=True)
class Generating:
    """How a worker computes."""

    dtype: DtypeName
    groups: int  # decoded together
    threads: int
    engine: EngineName = "torch"
    device: str = "cpu"


class Condition(BaseModel):
    """How the submissions of a folder were made, as written to its `worker.json`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    worker: Generating
    sampling: SamplingSection


@dataclass(frozen=True)
class Made:
    """A submission and how it was made."""

    worker: dict[str, Any]  # the fields of `Generating`, and `machine` if another one made it
    header: Header
    data: bytes


@dataclass(frozen=True)
class Checking:
    """How a validator computes."""

    dtype: DtypeName
    row_tokens: int  # tokens packed into one row of its prefill
    threads: int
    device: str = "cpu"


def conditions(config: Config, devices: Sequence[str], cores: int) -> tuple[list[Generating], list[Checking]]:
    """Return the conditions to measure: devices, and dtypes, batch sizes, packings and threads that differ widely."""
    groups, row_tokens = config.workers.groups_per_submission, ROW_TOKENS
    numerics = [(dtype, device) for device in devices for dtype in _dtypes(config, device)]
    return (
        [
            Generating(dtype, *shape, engine, device)
            for engine in dict.fromkeys(config.workers.engines)
            for dtype, device in numerics
            if engine == "torch" or device == config.model.device  # vLLM is built for one device
            for shape in ((groups, 1), (1, cores))
        ],
        [
            Checking(dtype, *shape, device)
            for dtype, device in numerics
            for shape in ((row_tokens, 1), (4 * row_tokens, cores))
        ],
    )


def _dtypes(config: Config, device: str) -> list[DtypeName]:
    """Return the config's dtype, which gives tighter limits, or both.

    Skip bf16 on machines that only emulate it, at a hundredth of the speed of fp32.
    """
    if config.model.dtype != "auto":
        return [config.model.dtype]
    emulated = measure_gflops(torch.bfloat16, device) < 0.1 * measure_gflops(torch.float32, device)
    return ["float32"] if emulated else ["float32", "bfloat16"]


def calibrate(
    config: Config,
    out: Path,
    submissions: int,
    weights: Sequence[Path],
    devices: Sequence[str],
    work: Sequence[Path],
    say: Callable[[str], None],
) -> None:
    """Measure with each of `weights` (empty: the config's model); write `limits.toml` and `measured.json`.

    `devices`: those of workers and validators (empty: the config's); each worker is judged on all of them.
    `work`: the `out` folders of other machines, whose work is judged, too.

    Raise ShoalError if honest work fails a check that has no limit.
    """
    folders = list(weights) or [resolve(config.model.name)]
    devices = devices or [config.model.device]
    for device in devices:
        check_device(device)
    if "vllm" in config.workers.engines and config.model.device not in devices:
        raise UserError(f"vLLM computes on model.device = {config.model.device}: add it to --devices")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{out} cannot be a folder, because a file is there: choose another --out") from error
    for folder in folders:
        if not any(folder.glob("*.safetensors")):
            raise UserError(f"{folder} holds no weights: expected the folder of a policy version")
    for foreign in (out / WORK).glob("*"):
        if not (foreign / CONDITION).exists():
            raise UserError(
                f"{foreign} is not from `shoal calibrate`, which replaces {out / WORK}: choose another --out"
            )
    policies = {weights_digest(folder): folder for folder in folders}
    others = [made for folder in work for made in read_work(config, folder, submissions, machine=str(folder))]
    for made in others:
        if made.header.policy_digest not in policies:
            raise UserError(f"{made.worker['machine']} has work of other weights: name a copy of them with --weights")
    generations, checkings = conditions(config, devices, torch.get_num_threads())
    discard(out / WORK)
    identity = Identity.generate()
    for policy, folder in policies.items():
        for generation in generations:
            make_work(config, generation, identity, policy, folder, submissions, out)
            say(f"{folder.name}, {generation}: {submissions} submissions")
    measured = measure(config, policies, read_work(config, out, submissions) + others, checkings, say)
    write_limits(config, out, measured)
    for machine in ("", *map(str, work)):
        failed = [row["failed_checks"] > 0 for row in measured if row["worker"].get("machine", "") == machine]
        whose = f"work of {machine}" if machine else "honest work"
        times = f"{len(failed)} times; the config's own limits would have rejected it {sum(failed)} times"
        say(f"{whose} was judged {times}")
    say(f"limits: {out / 'limits.toml'}")


def measure(
    config: Config,
    policies: Mapping[str, Path],
    work: Sequence[Made],
    checkings: Sequence[Checking],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Judge each submission under each validator condition. Return a row of figures for each judgement."""
    measured: list[dict[str, Any]] = []
    with ExitStack() as stack:
        judges = [stack.enter_context(_judge(config, checking)) for checking in checkings]
        for policy, folder in policies.items():
            for judge in judges:
                judge.load(folder)
            of_policy = [made for made in work if made.header.policy_digest == policy]
            for made, (checking, judge) in itertools.product(of_policy, zip(checkings, judges, strict=True)):
                number, worker = made.header.submission, made.header.worker
                assignment = offline_assignment(config, worker, number, header=made.header)
                try:
                    with use_threads(checking.threads):
                        figures = honest_figures(judge, assignment, worker, made.data)
                except ShoalError as error:
                    maker = made.worker.get("machine", "this machine")
                    raise ShoalError(f"submission {number} of {maker}: {error}") from error
                condition = {"weights": folder.name, "worker": made.worker, "validator": vars(checking)}
                measured.append(condition | {"kind": made.header.engine or "torch", "number": number} | figures)
            say(f"{folder.name}: {len(of_policy)} submissions judged by {len(checkings)} validators")
    return measured


def write_limits(config: Config, out: Path, measured: Sequence[dict[str, Any]]) -> None:
    """Derive the limits and bounds from the rows of `measure`; write `limits.toml` and `measured.json`."""
    kinds = [row["kind"] for row in measured]
    rows_of = {kind: [row for row in measured if row["kind"] == kind] for kind in dict.fromkeys(kinds)}
    worst = {kind: {name: max(float(row[name]) for row in rows) for name in LIMITS} for kind, rows in rows_of.items()}
    limits = {kind: limits_of(values) for kind, values in worst.items()}
    pairs = {
        pair: figures
        for kind, rows in rows_of.items()
        for pair, figures in by_pair(rows, limits[kind]["sampling_margin"]).items()
    }
    evidence = bounds(pairs)
    validator = limits.pop("torch", {}) | {"limits": limits}
    machine = {"platform": platform.platform(), "cores": torch.get_num_threads(), "torch": torch.__version__}
    figures = {"machine": machine, "worst": worst, "pairs": pairs, "rows": measured}
    (out / "measured.json").write_text(json.dumps(figures, indent=1) + "\n")
    sections = {"validator": {name: value for name, value in validator.items() if value}, "evidence": evidence}
    title = f"# {config.model.name}: the worst of {len(measured)} judgements of honest work, times a margin\n"
    (out / "limits.toml").write_text(title + tomli_w.dumps(sections))


def make_work(
    config: Config, generation: Generating, identity: Identity, policy: str, weights: Path, submissions: int, out: Path
) -> None:
    """Write submissions that were made under this condition into a new folder in `out`."""
    folder = out / WORK / f"{len(list(out.glob(f'{WORK}/*'))):03d}"
    folder.mkdir(parents=True)
    condition = Condition(worker=generation, sampling=config.sampling)
    write_file(folder / CONDITION, condition.model_dump_json().encode())
    with closing(_producer(config, generation, identity, weights)) as producer, use_threads(generation.threads):
        for number in range(submissions):
            groups = 1 if number % 2 else None  # small submissions too, because their means are noisier
            assignment = offline_assignment(config, identity.public, number, groups=groups)
            assignment = assignment.model_copy(update={"policy_digest": policy})
            write_file(folder / f"{number:06d}.parquet", producer.submission(assignment))


def read_work(config: Config, out: Path, least: int, *, machine: str = "") -> list[Made]:
    """Read what `make_work` wrote, perhaps on another machine. `least`: number of submissions of each worker.

    Raise UserError if something is missing or damaged, or was made with another config.
    """
    made: list[Made] = []
    with Quarantine(max_rollouts(config), config.sampling.max_tokens) as quarantine:
        for path in sorted((out / WORK).glob(f"*/{CONDITION}")):
            try:
                condition = Condition.model_validate_json(path.read_bytes())
                if condition.sampling != config.sampling:
                    raise UserError(
                        f"{out} was made with another [sampling]: run `shoal calibrate` with this config there"
                    )
                worker = vars(condition.worker) | ({"machine": machine} if machine else {})
                files = sorted(path.parent.glob("*.parquet"))
                for path in files:
                    data = path.read_bytes()
                    made.append(Made(worker, quarantine.read(data).header, data))
            except ValidationError as error:
                raise UserError(f"{path} is not what `shoal calibrate` writes: {first_problem(error)}") from error
            except (OSError, RolloutFileError) as error:
                raise UserError(f"{path} cannot be read: {first_line(error)}") from error
            if len(files) < least:
                raise UserError(
                    f"{path.parent} has {len(files)} submissions, fewer than {least}: copy it again, or lower --submissions"
                )
    if not made:
        raise UserError(
            f"{out} has no work: run `shoal calibrate` of this version on the other machine, and copy --out"
        )
    return made


def limits_of(worst: Mapping[str, float]) -> dict[str, float]:
    """Return [validator] limits by name, from the worst honest value of each statistic."""
    return {limit: round(max(margin * worst[name], floor), 4) for name, (limit, floor, margin) in LIMITS.items()}


def by_pair(measured: Sequence[dict[str, Any]], margin: float) -> dict[str, dict[str, Any]]:
    """Return by pair of numerics (WORKER|VALIDATOR): exposure, averages, counts of tokens beyond fractions of `margin`."""
    pairs: dict[str, dict[str, Any]] = {}
    pair_of_row = [f"{_numerics(row['worker'])}|{_numerics(row['validator'])}" for row in measured]
    for pair in dict.fromkeys(pair_of_row):
        rows = [row for row, its_pair in zip(measured, pair_of_row, strict=True) if its_pair == pair]
        misses = [nats for row in rows for nats in row["misses"]]
        pairs[pair] = {
            "exposure": sum(row["exposure"] for row in rows),
            "beyond": [sum(nats > part * margin for nats in misses) for part in BEYOND],
        } | {name: statistics.fmean(row[name] for row in rows) for name in AVERAGES}
    return pairs


def _numerics(condition: Mapping[str, Any]) -> str:
    """Return a condition's machine (unless this one), engine (unless torch), device (unless cpu) and dtype."""
    usual = {"machine": "", "engine": "torch", "device": "cpu"}
    named = [condition[name] for name, value in usual.items() if condition.get(name, value) != value]
    return " ".join([*named, condition["dtype"]])


def bounds(pairs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return [evidence] bounds: the rates and averages of the noisiest pair, times a margin."""
    rates = [
        max(RATE_MARGIN * (pair["beyond"][part] + 1) / max(pair["exposure"], 1.0) for pair in pairs.values())
        for part in range(len(BEYOND))
    ]
    averages = {
        name: round(max(MARGIN * max(pair[name] for pair in pairs.values()), LIMITS[name][1] / MARGIN), 5)
        for name in AVERAGES
    }
    return {"rates": [min(max(round(rate, 6), 1e-6), 1.0) for rate in rates]} | averages


def honest_figures(judge: Judge, assignment: Assignment, worker: str, data: bytes) -> dict[str, Any]:
    """Return the figures of the expensive checks on an honest file, whether they pass or not.

    `misses` are the margins above 0, in nats; `exposure` counts the tokens that numerics could have changed.
    """
    case = judge.open(assignment, worker, data)
    if isinstance(case, Finding):
        raise ShoalError(f"honest work cannot be read: {case.detail}")
    examined = judge.examine_cheaply(case)
    if examined.finding:
        raise ShoalError(f"honest work fails a cheap check: {examined.finding.detail}")
    case = judge.prefill([examined.case])[0]
    if fault := computed_fault(case.computed()):
        raise ShoalError(f"honest work cannot be measured: {fault}; calibrate with other weights")
    outcomes = [check(judge.rules, case) for check in EXPENSIVE]
    figures: dict[str, Any] = {name: value for outcome in outcomes for name, value in outcome.evidence.items()}
    failed = sum(outcome.finding is not None for outcome in outcomes)
    margins_N = case.computed().margins_N
    misses = [round(nats, 5) for nats in margins_N[margins_N > 0].tolist()]
    exposure = spent(case, judge.config, figures).exposure
    return figures | {
        "failed_checks": float(failed),
        "rollouts": float(len(case.rows)),
        "exposure": round(exposure, 3),
        "misses": misses,
    }


def _judge(config: Config, checking: Checking) -> Judge:
    # fast, because the limits apply between machines with different numerics
    model = config.model.model_copy(update={"numerics": "fast", "device": checking.device})
    return Judge(config.model_copy(update={"model": model}), RUN, checking.dtype, row_tokens=checking.row_tokens)


def _producer(config: Config, generation: Generating, identity: Identity, folder: Path) -> Producer:
    kind = ""
    engine: Engine = TorchEngine(generation.dtype, generation.device)
    if generation.engine == "vllm":
        engine = VllmEngine(generation.dtype, generation.threads)
        kind = f"{generation.engine}/{torch.device(generation.device).type}"
    producer = _BatchedProducer(config, RUN, identity, engine, kind=kind)
    producer.groups = generation.groups
    producer.load(folder, 0)
    return producer


class _BatchedProducer(Producer):
    """Decode `groups` groups at a time. Different batch shapes round differently."""

    groups = 1

    def close(self) -> None:
        super().close()
        if isinstance(self.engine, VllmEngine):
            self.engine.close()

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        parts = [slice(start, start + self.groups) for start in range(0, len(prompts), self.groups)]
        return [group for part in parts for group in super(_BatchedProducer, self).complete(prompts[part], plans[part])]
