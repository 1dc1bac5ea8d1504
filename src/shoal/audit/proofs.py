"""A sample of accepted submissions judged again: signatures, tasks, seeds, proofs, tokens, rewards.

Invariant: what is judged again is judged whole, by the same code and limits as a validator's, with weights whose digest is
in the ledger. Called by `audit`, with the versions that `rerun` made.
"""

from pathlib import Path

from shoal.audit.opened import BrokenError, Opened, naming
from shoal.audit.work import Accepted
from shoal.coordinator.jobs.curriculum import read_page
from shoal.coordinator.tables.curricula import Curricula
from shoal.model.dtype import DtypeName


def judge_again(run: Opened, sample: list[Accepted], weights: Path, dtype: DtypeName, scratch: Path) -> None:
    """All of the version whose weights these are. Raises BrokenError, which names the first that would be rejected."""
    from shoal import tasks
    from shoal.store.rollouts import RolloutFileError
    from shoal.validator.by_hand import offline_assignment
    from shoal.validator.case import Finding
    from shoal.validator.judge import Judge

    def fetch(sha256: str, most_bytes: int) -> bytes:
        return (run.coordinator / "tasks" / sha256).read_bytes()

    if not sample:
        return
    pages = Curricula(run.connection) if run.connection and run.config.tasks.curriculum == "pass_rate" else None
    page = {"page": lambda digest: read_page(pages, digest)} if pages else {}
    loaded = tasks.join(run.config.tasks, scratch / "tasks", fetch) if run.config.tasks.digest else None
    with Judge(run.config, run.run, dtype, loaded, **page) as judge:  # type: ignore[arg-type]
        judge.load(weights)
        for one in sample:
            link = f"proofs of {one.id}"
            with naming(link):
                data = run.store.get("submissions", one.file)
                header = judge.quarantine.read(data).header
                asked = offline_assignment(
                    run.config,
                    one.worker,
                    int(one.id[-6:]),
                    step=one.step,
                    version=one.version,
                    digest=header.policy_digest,
                    nonce=one.nonce,
                    groups=header.groups,
                    curriculum=pages.digest(one.step) if pages else "",
                )
                case = judge.open(asked, one.worker, data)
                if isinstance(case, Finding):
                    raise RolloutFileError(case.detail)
                finding = judge.examine([case])[0].finding
                if finding is not None:
                    raise BrokenError(link, f"a validator would reject it ({finding.reason}): {finding.detail}")
