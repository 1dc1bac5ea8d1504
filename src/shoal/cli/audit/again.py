"""Computed again: submissions judged by a validator's code, and one step trained by the learner's code.

    accepted   a sample of each version that is at hand; rejected: every hard rejection whose weights are at hand
    state      a checkpoint that the learner signed, or the model that the run began with
    before     written as the learner publishes it; its digest is in the learner's record
    after      likewise, once the step is trained: equal to the last bit, where this machine computes as the learner's did

Invariants: what is judged again is judged whole, by a validator's own code and limits, with weights whose digest is in the
ledger. A hard rejection holds if this machine's validator would slash for that file, too, for whichever reason. Only a
machine that computes alike (`record.computed`) can say that bits are wrong. Another one says so, and compares nothing.
Left out: the validator's exactness class, so a file is judged by the limits alone, which are wider; a learner of several
ranks; one at several sites, whose moments and rounding no checkpoint that its record names holds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from shoal import tasks
from shoal.cli.audit.files import file_digest
from shoal.cli.audit.opened import BrokenError, Opened, naming
from shoal.cli.audit.pay import Accepted, Found
from shoal.cli.audit.work import gather_step
from shoal.config import Config
from shoal.learner.loop import Learner
from shoal.learner.policy import Policy
from shoal.learner.ranks import Ranks
from shoal.learner.report import computed
from shoal.model import numerics
from shoal.model.dtype import DtypeName, temporarily_on
from shoal.model.load import WEIGHTS
from shoal.model.sources import resolve
from shoal.protocol.messages import HARD, Computed, Reason
from shoal.shardcast.manifest import version_name
from shoal.validator.by_hand import find_weights, offline_assignment
from shoal.validator.case import Finding
from shoal.validator.judge import Judge

CHECKPOINT = "step-{:06d}"


@dataclass(frozen=True)
class Again:
    """A step that was run again. Equal `here` and `there`: its bits were compared."""

    step: int
    versions: Path  # holds the folders of the versions before and after it
    here: Computed
    there: Computed

    @property
    def compared(self) -> bool:
        return self.here == self.there

    @property
    def before(self) -> Path:
        return self.versions / version_name(self.step)


def states(run: Opened, found: Found) -> list[int]:
    """The trained steps whose state before them is at hand."""
    folders = (run.folder / "learner" / "checkpoints").glob("step-*")
    kept = {0, *(int(path.name.removeprefix("step-")) for path in folders)}
    trained = [step for step in sorted(kept) if step < len(found.records) and not found.configs[step].learner.sites]
    return [step for step in trained if found.records[step].computed.ranks == 1]


@contextmanager
def rerun(run: Opened, found: Found, step: int, scratch: Path) -> Iterator[Again]:
    """Yields once the step is trained and its weights are compared. Raises BrokenError."""
    record, config = found.records[step], found.configs[step]
    section = config.learner.model_copy(update={"keep_versions": 2})
    config = config.model_copy(update={"learner": section})
    dtype = record.computed.dtype
    if step:
        kept = scratch / "checkpoints" / CHECKPOINT.format(step)
        kept.parent.mkdir(parents=True)
        kept.symlink_to((run.folder / "learner" / "checkpoints" / kept.name).resolve(), target_is_directory=True)
    with temporarily_on(record.computed.threads), naming(f"step {step + 1}"):
        torch.manual_seed(config.run.seed)
        picked = numerics.pick(config.model.numerics, dtype, config.model.device)
        folder, temperature = resolve(config.model.name), config.sampling.temperature
        policy = Policy(folder, section, dtype, config.model.device, temperature, Ranks(), picked)
        again = Again(step, scratch / "versions", computed(policy), record.computed)
        learner = Learner(None, config, policy, scratch)
        progress = learner.checkpoints.restore()
        learner.publish(progress)
        _compare(again, step, record.before)
        learner.train(gather_step(run, found, step).groups)
        progress.advance([])
        learner.publish(progress)
        _compare(again, step + 1, record.after)
    yield again


def _compare(again: Again, version: int, digest: str) -> None:
    if again.compared and file_digest(again.versions / version_name(version) / WEIGHTS) != digest:
        why = f"run again, it does not give the published weights of version {version}"
        raise BrokenError(f"step {again.step + 1}", why)


# --- submissions judged again ----------------------------------------------------------------------------------------


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
    judged, weights = 0, _at_hand(run, found) if limit else {}
    for id, one in hard.items():
        version, link = one.body["version"], f"rejection of {id}"
        if version not in weights:
            why = f"weights of version {version} are not at hand" if limit else "not asked for (--proofs 0)"
            found.unproven[f"hard rejections: {why}"] += 1
            continue
        dtype = found.records[min(version, len(found.records) - 1)].computed.dtype
        with _judging(run, one.config, dtype) as judge, naming(link):
            judge.load(weights[version])
            finding = _finding(judge, run, id, one.worker, one.body["file"])
        if finding is None or finding.reason not in HARD:
            instead = "accept it" if finding is None else f"reject it softly ({finding.reason})"
            raise BrokenError(link, f"{one.worker[:16]} was slashed for {one.reason}; a validator would {instead}")
        judged += 1
    return f"hard rejections: {judged} of {len(hard)} judged again" if hard else ""


def _at_hand(run: Opened, found: Found) -> dict[int, Path]:
    """Folders of versions, by version, whose weights are those that the learner recorded."""
    folders = {}
    digests = [record.before for record in found.records[:1]] + [record.after for record in found.records]
    for version, digest in enumerate(digests):
        try:
            folder = find_weights(run.folder, version)
        except FileNotFoundError:
            folder = run.folder / "model"  # the newest version of a finished run
        path = folder / WEIGHTS
        if path.is_file() and file_digest(path) == digest:
            folders[version] = folder
    return folders


def _finding(judge: Judge, run: Opened, id: str, worker: str, file: str) -> Finding | None:
    """What a validator would find in a submission of the loaded version; None: nothing."""
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
    )
    case = judge.open(asked, worker, data)
    return case if isinstance(case, Finding) else judge.examine([case])[0].finding


@contextmanager
def _judging(run: Opened, config: Config, dtype: DtypeName) -> Iterator[Judge]:
    def fetch(sha256: str, most_bytes: int) -> bytes:
        return (run.coordinator / "tasks" / sha256).read_bytes()

    with TemporaryDirectory() as scratch:
        loaded = tasks.join(config.tasks, Path(scratch) / "tasks", fetch) if config.tasks.digest else None
        with Judge(config, run.run, dtype, loaded) as judge:
            yield judge
