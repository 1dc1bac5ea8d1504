"""Submissions judged again: a sample of the accepted ones, and every hard rejection whose weights are at hand.

Invariant: what is judged again is judged whole, by the same code and limits as a validator's, with weights whose digest is
in the ledger. A hard rejection holds if this machine's validator would slash for that file, too, for whichever reason.
Called by `audit`, with the versions that `rerun` made. Left out: the validator's exactness class, so a file is judged by
the limits alone, which are wider.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from blake3 import blake3

from shoal.cli.audit.found import Accepted, Found, Rejected
from shoal.cli.audit.opened import BrokenError, Opened, naming
from shoal.config import Config
from shoal.coordinator.curriculum import Curricula
from shoal.model.dtype import DtypeName
from shoal.protocol.messages import HARD, Reason

if TYPE_CHECKING:
    from shoal.validator.case import Finding
    from shoal.validator.judge import Judge


def judge_again(run: Opened, sample: list[Accepted], weights: Path, dtype: DtypeName) -> None:
    """All of the version whose weights these are. Raises BrokenError, which names the first that would be rejected."""
    if not sample:
        return
    with _judging(run, run.config, dtype) as judge:
        judge.load(weights)
        for one in sample:
            link = f"proofs of {one.id}"
            with naming(link):
                finding = _finding(judge, run, one.id, one.worker, one.file)
            if finding is not None:
                raise BrokenError(link, f"a validator would reject it ({finding.reason}): {finding.detail}")


def judge_rejections(run: Opened, found: Found, *, limit: int) -> str:
    """Every hard rejection, if `limit` is not 0. Raises BrokenError for one that a validator would not slash for.

    Returns a line, "" if there is none. What cannot be judged is counted in `found.unproven`. That a worker repeated its own
    accepted file was checked already.
    """
    hard = {id: one for id, one in found.rejected.items() if one.reason in HARD and one.reason is not Reason.REPLAYED}
    why = ""
    if not limit:
        why = "not asked for (--proofs 0)"
    elif run.config.tasks.curriculum == "pass_rate" and run.connection is None:
        why = "the curriculum's pages are in the tables"
    judged, weights = 0, {} if why else _at_hand(run, found)
    for version in sorted({one.body["version"] for one in hard.values()}):
        these = {id: one for id, one in hard.items() if one.body["version"] == version}
        if version in weights:
            _judge_rejected(run, found, these, weights[version])
            judged += len(these)
        else:
            found.unproven[f"hard rejections: {why or f'weights of version {version} are not at hand'}"] += len(these)
    return f"hard rejections: {judged} of {len(hard)} judged again" if hard else ""


def _judge_rejected(run: Opened, found: Found, these: Mapping[str, Rejected], weights: Path) -> None:
    for id, one in these.items():
        dtype = found.records[min(one.body["version"], len(found.records) - 1)].computed.dtype
        with _judging(run, one.config, dtype) as judge:
            link = f"rejection of {id}"
            with naming(link):
                judge.load(weights)
                finding = _finding(judge, run, id, one.worker, one.body["file"])
            if finding is None or finding.reason not in HARD:
                instead = "accept it" if finding is None else f"reject it softly ({finding.reason})"
                raise BrokenError(link, f"{one.worker[:16]} was slashed for {one.reason}; a validator would {instead}")


def _at_hand(run: Opened, found: Found) -> dict[int, Path]:
    """Folders of versions, by version, whose weights are those that the learner recorded."""
    from shoal.model.load import WEIGHTS
    from shoal.validator.by_hand import find_weights

    folders = {}
    digests = [record.before for record in found.records[:1]] + [record.after for record in found.records]
    for version, digest in enumerate(digests):
        try:
            folder = find_weights(run.folder, version)
        except FileNotFoundError:
            folder = run.folder / "model"  # of a finished run: the newest
        path = folder / WEIGHTS
        if path.is_file() and blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest() == digest:
            folders[version] = folder
    return folders


def _finding(judge: "Judge", run: Opened, id: str, worker: str, file: str) -> "Finding | None":
    """What a validator would find in a submission of the loaded version; None: nothing."""
    from shoal.validator.by_hand import offline_assignment
    from shoal.validator.case import Finding

    data = run.store.get("submissions", file)
    header = judge.quarantine.read(data).header  # the walk compared it with the ledger
    asked = offline_assignment(
        judge.config,
        worker,
        int(id[-6:]),
        step=header.step,
        version=header.policy_version,
        digest=header.policy_digest,
        nonce=header.nonce,
        groups=header.groups,
        curriculum=header.curriculum,
    )
    case = judge.open(asked, worker, data)
    return case if isinstance(case, Finding) else judge.examine([case])[0].finding


@contextmanager
def _judging(run: Opened, config: Config, dtype: DtypeName) -> "Iterator[Judge]":
    from shoal import tasks
    from shoal.validator.judge import Judge

    def fetch(sha256: str, most_bytes: int) -> bytes:
        return (run.coordinator / "tasks" / sha256).read_bytes()

    pages = Curricula(run.connection) if run.connection and config.tasks.curriculum == "pass_rate" else None
    page = {"page": pages.page} if pages else {}
    with TemporaryDirectory() as scratch:
        loaded = tasks.join(config.tasks, Path(scratch) / "tasks", fetch) if config.tasks.digest else None
        with Judge(config, run.run, dtype, loaded, **page) as judge:  # type: ignore[arg-type]
            yield judge
