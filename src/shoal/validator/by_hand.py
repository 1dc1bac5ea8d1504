"""`shoal audit FILE`: check one submission and explain every check, for operators and for workers whose work was rejected.

The file is checked against the task that the run's records name, or else against the one that its own header names.
Only the pool knows which exactness class the worker claimed. So the verdict uses the tolerances. The file is also
compared bit for bit, because a validator of the worker's class would reject any difference as `inexact`.
Invariant: a question is answered with yes only if it was asked of something that the file's author did not write.
"""

from pathlib import Path
from typing import Any

from shoal.config import Config
from shoal.model.dtype import DtypeName
from shoal.protocol.messages import Assignment
from shoal.shardcast.manifest import parse_version, version_name
from shoal.store.columns import RolloutFileError
from shoal.store.quarantine import Quarantine
from shoal.store.rollouts import Header
from shoal.tasks.derive import max_rollouts
from shoal.validator.case import Finding, Outcome
from shoal.validator.checks import ALL, EXACT, EXPENSIVE, Check
from shoal.validator.judge import Judge

ACCEPTED, REJECTED, UNREADABLE = 0, 1, 2
NO_TASK = "not asked: the run's records are not here, so the task is the one that the file itself names"
EQUAL = "this machine computes the same bits"
UNEQUAL = (
    "within the limits, but not the same bits: a validator of the worker's exactness class would reject this as inexact, "
    "but this machine may belong to another class"
)


def read_header(data: bytes, config: Config) -> Header:
    """Return the header of a submission with a valid signature. Raise RolloutFileError."""
    with Quarantine(max_rollouts(config), config.sampling.max_tokens) as quarantine:
        return quarantine.read(data).header


def verify(
    data: bytes,
    header: Header,
    config: Config,
    weights: Path,
    dtype: DtypeName,
    assigned: Header | None = None,
) -> tuple[int, list[str]]:
    """Return the exit status, and lines of text on each check that ran. Raise RolloutFileError if unreadable.

    `assigned`: the header of an honest file for this task, by the run's records.
    """
    unasked = {} if assigned else dict.fromkeys(("context", "derived_tasks"), NO_TASK)
    assigned = assigned or header
    with Judge(config, assigned.run, dtype) as judge:
        judge.load(weights)
        assignment = offline_assignment(config, assigned.worker, assigned.submission, header=assigned)
        case = judge.open(assignment, assigned.worker, data)
        if isinstance(case, Finding):
            raise RolloutFileError(case.detail)
        lines: list[str] = []
        for check in ALL:
            if check is EXPENSIVE[0]:
                [case] = judge.prefill([case])
            outcome = check(judge.rules, case)
            lines += _explain(check, outcome, unasked.get(check.__name__, ""))
            if outcome.finding:
                return REJECTED, [*lines, "rejected; the checks after this one did not run"]
        compared = [(check, check(judge.rules, case)) for check in EXACT]
        lines += ["compared bit for bit, as a validator of the worker's exactness class would do:"]
        lines += [line for check, outcome in compared for line in _explain(check, outcome)]
        lines.append(UNEQUAL if any(outcome.finding for _, outcome in compared) else EQUAL)
        return ACCEPTED, [*lines, "; not asked: ".join(["accepted", *filter(None, [", ".join(unasked)])])]


def check_weights(folder: Path, version: int) -> None:
    """Raise FileNotFoundError if the folder's name says that it holds another version."""
    named = parse_version(folder.name)
    if named not in (None, version):
        raise FileNotFoundError(f"{folder} holds version {named}, but the file was made with version {version}")


def find_weights(run: Path, version: int) -> Path:
    """Return the folder that holds a version in the output of `shoal run`. Raise FileNotFoundError if there is none."""
    name = version_name(version)
    for folder in (run / "learner" / "versions" / name, *sorted(run.glob(f"*/weights/{name}"))):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"{run} no longer holds version {version}: name its folder with --weights (a finished run keeps only the last)"
    )


def offline_assignment(
    config: Config, worker: str, number: int, *, groups: int | None = None, header: Header | None = None
) -> Assignment:
    """Make an assignment without a coordinator, from a file's header if there is one. No field is validated."""
    id = f"{worker[:16]}-{number:06d}"
    fields: dict[str, Any] = {"step": 0, "policy_version": 0, "policy_digest": "0" * 64, "nonce": "0" * 32}
    fields["groups"] = config.workers.groups_per_submission if groups is None else groups
    if header is not None:
        fields = {name: getattr(header, name) for name in fields}
    return Assignment.model_construct(id=id, number=number, upload_path=f"/v1/submissions/{id}", **fields)


def _explain(check: Check, outcome: Outcome, unasked: str = "") -> list[str]:
    question = (check.__doc__ or "").strip().partition("\n")[0]
    no = "no " if check in EXACT else "NO "  # "no" is no fault: machines of different classes may differ in a bit
    lines = [f"{no if outcome.finding else '-- ' if unasked else 'yes'}  {check.__name__:15} {question}"]
    if unasked:
        lines.append(f"     {unasked}")
    if outcome.finding:
        lines.append(f"     {outcome.finding.reason}: {outcome.finding.detail}")
    if outcome.evidence:
        lines.append("     " + ", ".join(f"{name} {value:.3g}" for name, value in outcome.evidence.items()))
    return lines
