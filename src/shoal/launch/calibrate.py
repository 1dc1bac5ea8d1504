"""Measures what honest work looks like to the validator on this machine, and writes the limits that follow.

Numerics differ between dtypes, batch shapes, packings and thread counts, so an honest worker's proofs and tokens never
agree exactly. Every worker condition is judged under every validator condition; the worst honest figure of each statistic,
times a margin, becomes the limit.

    limits.toml     [validator] limits, for `--with`
    measured.json   every submission's figures, by condition

Measure the policy as it is at first, when it is least sure and logprobs differ most, and a trained one.
Called by `shoal calibrate`. Left out: other machines. Run it on each kind that will join, and lay the widest limits over
the config.
"""

import itertools
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch

from shoal.config import Config
from shoal.engine.protocol import Completion
from shoal.engine.torch_engine import TorchEngine
from shoal.errors import ShoalError
from shoal.model.dtype import DtypeName, measure_gflops
from shoal.model.sources import resolve
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Assignment
from shoal.rollout.produce import Producer
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Finding
from shoal.validator.checks import CHEAP, DEAR, first
from shoal.validator.judge import Judge

RUN = "calibration"
MARGIN = 1.5  # limit = this times the worst honest figure, but not under the floor below
TAIL_MARGIN = 3.0  # the same for the mean margin, to which one rare token adds much
LIMITS = {  # statistic -> (limit's name in [validator], floor, margin)
    "proof_exponent_mean": ("proof_exponent_mean", 4.0, MARGIN),
    "proof_mantissa_mean": ("proof_mantissa_mean", 0.5, MARGIN),
    "logprob_error_mean": ("logprob_error_mean", 0.02, MARGIN),
    "margin_max": ("sampling_margin", 0.75, MARGIN),
    "margin_mean": ("sampling_margin_mean", 0.005, TAIL_MARGIN),
}


class CalibrationError(ShoalError):
    """Honest work that no limit can save: it fails a check that has none."""


@dataclass(frozen=True)
class Generation:
    """How a worker computes."""

    dtype: DtypeName
    groups: int  # decoded together
    threads: int


@dataclass(frozen=True)
class Checking:
    """How a validator computes."""

    dtype: DtypeName
    row_tokens: int  # packing of its prefill
    threads: int


def conditions(config: Config, cores: int) -> tuple[list[Generation], list[Checking]]:
    """What is tried: both dtypes, small and large batches, tight and loose packing, one thread and all.

    A config that fixes model.dtype for all machines gets that dtype alone, and tighter limits for it. bf16 is left out
    where this machine only emulates it, a hundred times slower than fp32.
    """
    groups, row_tokens = config.workers.groups_per_submission, config.validator.row_tokens
    dtypes: list[DtypeName] = ["float32", "bfloat16"]
    if config.model.dtype != "auto":
        dtypes = [config.model.dtype]
    elif measure_gflops(torch.bfloat16, config.model.device) < 0.1 * measure_gflops(torch.float32, config.model.device):
        dtypes.remove("bfloat16")
    return (
        [Generation(dtype, *shape) for dtype in dtypes for shape in ((groups, 1), (1, cores))],
        [Checking(dtype, *shape) for dtype in dtypes for shape in ((row_tokens, 1), (4 * row_tokens, cores))],
    )


def calibrate(config: Config, out: Path, submissions: int, weights: Sequence[Path], say: Callable[[str], None]) -> None:
    """Measure on each of `weights` (none: the config's model), and write both files.

    Raises CalibrationError where honest work fails a check without a limit.
    """
    folders = list(weights) or [resolve(config.model.name)]
    generations, checkings = conditions(config, torch.get_num_threads())
    identity = Identity.generate()
    measured: list[dict[str, Any]] = []
    with ExitStack() as stack:
        judges = [stack.enter_context(_judge(config, checking)) for checking in checkings]
        for folder, generation in itertools.product(folders, generations):
            producer = _producer(config, generation, identity, folder)
            for judge in judges:
                judge.load(folder)
            for number in range(submissions):
                asked = offline_assignment(config, identity.public, number)
                with _threads(generation.threads):
                    data = producer.submission(asked)
                for checking, judge in zip(checkings, judges, strict=True):
                    with _threads(checking.threads):
                        figures = honest_figures(judge, asked, identity.public, data)
                    what = {"weights": folder.name, "worker": vars(generation), "validator": vars(checking)}
                    measured.append(what | {"number": number} | figures)
            say(f"{folder.name}, {generation}: {submissions} submissions under {len(checkings)} validators")
    worst = {name: max(float(row[name]) for row in measured) for name in LIMITS}
    limits = {limit: round(max(margin * worst[name], floor), 4) for name, (limit, floor, margin) in LIMITS.items()}
    out.mkdir(parents=True, exist_ok=True)
    (out / "measured.json").write_text(
        json.dumps({"machine": _machine(), "worst": worst, "rows": measured}, indent=1) + "\n"
    )
    (out / "limits.toml").write_text(
        f"# {config.model.name}: with a margin over the worst of {len(measured)} honest judgements\n"
        + tomli_w.dumps({"validator": limits})
    )
    for name, (limit, _, _) in LIMITS.items():
        say(f"validator.{limit} = {limits[limit]:g}  (worst honest {worst[name]:.4g})")
    failed = sum(row["failed_checks"] > 0 for row in measured)
    rollouts = sum(int(row["rollouts"]) for row in measured)
    say(
        f"under the config's own limits {failed} of {len(measured)} judgements ({rollouts} rollouts) would have rejected"
    )


def honest_figures(judge: Judge, asked: Assignment, worker: str, data: bytes) -> dict[str, float]:
    """What the dear checks measure on an honest file, whatever their limits say of it."""
    case = judge.open(asked, worker, data)
    if isinstance(case, Finding):
        raise CalibrationError(f"honest work cannot be read: {case.detail}")
    assert judge.rules is not None
    if finding := first(CHEAP, judge.rules, case):
        raise CalibrationError(f"honest work fails a cheap check: {finding.detail}")
    judge.prefill([case])
    failed = [check.__name__ for check in DEAR if check(judge.rules, case)]
    return case.evidence | {"failed_checks": float(len(failed)), "rollouts": float(len(case.rows))}


def _machine() -> dict[str, str | int]:
    return {"platform": platform.platform(), "cores": torch.get_num_threads(), "torch": torch.__version__}


def _judge(config: Config, checking: Checking) -> Judge:
    section = config.validator.model_copy(update={"row_tokens": checking.row_tokens})
    return Judge(config.model_copy(update={"validator": section}), RUN, checking.dtype)


def _producer(config: Config, generation: Generation, identity: Identity, folder: Path) -> Producer:
    producer = _InParts(config, RUN, identity, TorchEngine(generation.dtype, config.model.device))
    producer.groups = generation.groups
    producer.load(folder, 0)
    return producer


class _InParts(Producer):
    """Decodes so many groups together: another batch shape, and with it other rounding."""

    groups = 1

    def complete(self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]]) -> list[list[Completion]]:
        parts = [slice(start, start + self.groups) for start in range(0, len(prompts), self.groups)]
        return [group for part in parts for group in super(_InParts, self).complete(prompts[part], seeds[part])]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
