"""Checks one submission by hand and explains every check. For operators, and for workers whose work was rejected.

The file is checked against the task that its own header names. Only the pool knows whether the coordinator gave out that
task, whether these rollouts were submitted before, and which exactness class the worker claimed. So it is judged by the
limits, and then compared bit for bit as well: within a class, what differs would be `inexact`.
"""

from collections.abc import Sequence
from pathlib import Path

from shoal.config import Config
from shoal.model.dtype import DtypeName
from shoal.protocol.messages import Assignment
from shoal.shardcast.manifest import version_name
from shoal.store.quarantine import Quarantine
from shoal.store.rollouts import Header, RolloutFileError
from shoal.tasks.derive import max_rollouts
from shoal.validator.case import Case, Finding, Outcome
from shoal.validator.checks import EXACT, EXPENSIVE, FILE, GRADED, Check, bounds
from shoal.validator.judge import Judge

ACCEPTED, REJECTED, UNREADABLE = 0, 1, 2
EQUAL = "this machine computes the same to the last bit"
UNEQUAL = (
    "within the limits, but not to the last bit: a validator of the worker's class would say inexact; this machine "
    "may be of another"
)


def read_header(data: bytes, config: Config) -> Header:
    """The header of a readable submission under a valid signature. Raise RolloutFileError."""
    with Quarantine(max_rollouts(config), config.sampling.max_tokens) as quarantine:
        return quarantine.read(data).header


def verify(
    data: bytes,
    header: Header,
    config: Config,
    weights: Path,
    dtype: DtypeName,
) -> tuple[int, list[str]]:
    """The exit status, and lines of text for each check that ran."""
    with Judge(config, header.run, dtype) as judge:
        judge.load(weights)
        asked = offline_assignment(
            config,
            header.worker,
            header.submission,
            step=header.step,
            version=header.policy_version,
            digest=header.policy_digest,
            nonce=header.nonce,
            groups=header.groups,
        )
        case = judge.open(asked, header.worker, data)
        if isinstance(case, Finding):
            raise RolloutFileError(case.detail)
        findings, lines = _run(judge, FILE, case)
        if findings:
            return REJECTED, [*lines, "rejected; what needs a forward of the model, and rewards, were not checked"]
        case = judge.prefill([case])[0]
        findings, more = _run(judge, EXPENSIVE, case)
        lines += more
        if findings:
            return REJECTED, [*lines, "rejected; rewards were not checked"]
        inexact, more = _run(judge, EXACT, case)
        lines += ["to the last bit, as within an exactness class:", *more]
        findings, more = _run(judge, GRADED, judge.grade(case))
        if findings:
            return REJECTED, [*lines, *more, "rejected"]
        return ACCEPTED, [*lines, *more, UNEQUAL if inexact else EQUAL, "accepted"]


def _run(judge: Judge, checks: Sequence[Check], case: Case) -> tuple[set[str], list[str]]:
    """Run these checks. Return the names of those that found something, and lines of text.

    What comes after `bounds` relies on them, and is left out where they are exceeded.
    """
    assert judge.rules is not None
    findings, lines = set(), []
    for check in checks:
        outcome = check(judge.rules, case)
        lines += _explain(check, outcome)
        if outcome.finding:
            findings.add(check.__name__)
            if check is bounds:
                break
    return findings, lines


def find_weights(run: Path, version: int) -> Path:
    """The folder of a version in the output of `shoal run`. Raise FileNotFoundError."""
    name = version_name(version)
    for folder in (run / "learner" / "versions" / name, *sorted(run.glob(f"*/weights/{name}"))):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"{run} no longer holds version {version}: name its folder with --weights (a finished run keeps the last one only)"
    )


def offline_assignment(
    config: Config,
    worker: str,
    number: int,
    *,
    step: int = 0,
    version: int = 0,
    digest: str = "0" * 64,
    nonce: str = "0" * 32,
    groups: int | None = None,
) -> Assignment:
    """An assignment that no coordinator gave out. Its numbers may be ones that no coordinator gives out."""
    id = f"{worker[:16]}-{number:06d}"
    return Assignment.model_construct(
        id=id,
        number=number,
        step=step,
        policy_version=version,
        policy_digest=digest,
        nonce=nonce,
        groups=config.workers.groups_per_submission if groups is None else groups,
        deadline_s=0.0,
        upload_path=f"/v1/submissions/{id}",
        max_bytes=config.max_submission_bytes,
    )


def _explain(check: Check, outcome: Outcome) -> list[str]:
    question = (check.__doc__ or "").strip().partition("\n")[0]
    wrong = "no " if check in EXACT else "NO "  # a difference outside of a class is not a fault
    lines = [f"{wrong if outcome.finding else 'yes'}  {check.__name__:15} {question}"]
    if outcome.finding:
        lines.append(f"     {outcome.finding.reason}: {outcome.finding.detail}")
    if outcome.evidence:
        lines.append("     " + ", ".join(f"{name} {value:.3g}" for name, value in outcome.evidence.items()))
    return lines
