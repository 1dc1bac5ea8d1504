"""One submission checked by hand: every check that can run, in words. For operators, and for workers who were rejected.

The file is held against the task that it says it is for: whether the coordinator gave that task out, and whether these
rollouts were handed in before, only the pool knows.
Called by `shoal verify`.
"""

from pathlib import Path

from shoal.config import Config
from shoal.model.dtype import DtypeName
from shoal.protocol.messages import Assignment
from shoal.store.quarantine import Quarantine
from shoal.store.rollouts import Header, RolloutFileError, read_submission
from shoal.validator.case import Finding
from shoal.validator.checks import CHEAP, DEAR, Check
from shoal.validator.judge import Judge

ACCEPTED, REJECTED, UNREADABLE = 0, 1, 2


def read_header(data: bytes, config: Config) -> Header:
    """The header of a submission that is readable and signed by whom it names. Raises RolloutFileError."""
    rows = config.workers.groups_per_submission * config.sampling.group_size
    with Quarantine(rows, config.sampling.max_tokens) as quarantine:
        quarantine.check(data)
    return read_submission(data, max_rows=rows, max_tokens=config.sampling.max_tokens).header


def verify(data: bytes, header: Header, config: Config, weights: Path, dtype: DtypeName) -> tuple[int, list[str]]:
    """The exit status, and a line for each check."""
    with Judge(config, header.run, dtype) as judge:
        judge.load(weights)
        asked = offline_assignment(
            config,
            header.worker,
            header.submission,
            step=header.step,
            version=header.policy_version,
            digest=header.policy_digest,
        )
        case = judge.open(asked, header.worker, data)
        if isinstance(case, Finding):
            raise RolloutFileError(case.detail)
        assert judge.rules is not None
        lines: list[str] = []
        rejected = False
        for check in [*CHEAP, *DEAR]:
            if check is DEAR[0]:
                if rejected:
                    return REJECTED, [*lines, "rejected; what needs a forward of the model was not checked"]
                judge.prefill([case])
            known = len(case.evidence)
            finding = check(judge.rules, case)
            lines += _explain(check, finding, list(case.evidence.items())[known:])
            rejected |= finding is not None
        return (REJECTED, [*lines, "rejected"]) if rejected else (ACCEPTED, [*lines, "accepted"])


def find_weights(run: Path, version: int) -> Path:
    """The folder of a version in what `shoal run` left behind. Raises FileNotFoundError."""
    name = f"v{version:06d}"
    for folder in (run / "learner" / "versions" / name, *sorted(run.glob(f"*/weights/{name}"))):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"{run} no longer holds version {version}; name its folder with --weights")


def offline_assignment(
    config: Config, worker: str, number: int, *, step: int = 0, version: int = 0, digest: str = "0" * 64
) -> Assignment:
    """A task that no coordinator gave out (and, for what a header says of itself, might never give out)."""
    id = f"{worker[:16]}-{number:06d}"
    return Assignment.model_construct(
        id=id,
        number=number,
        step=step,
        policy_version=version,
        policy_digest=digest,
        groups=config.workers.groups_per_submission,
        deadline_s=0.0,
        upload_path=f"/v1/submissions/{id}",
        max_bytes=config.coordinator.max_submission_bytes,
    )


def _explain(check: Check, finding: Finding | None, measured: list[tuple[str, float]]) -> list[str]:
    lines = [f"{'NO ' if finding else 'yes'}  {check.__name__:15} {(check.__doc__ or '').strip()}"]
    if finding:
        lines.append(f"     {finding.reason}: {finding.detail}")
    if measured:
        lines.append("     " + ", ".join(f"{name} {value:.3g}" for name, value in measured))
    return lines
