"""One step again: the learner's own code, from the state before the step, on the groups that the ledger names.

    state     a checkpoint that the learner signed, or the model that the run began with
    before    written as the learner publishes it; its digest is in the learner's record
    after     likewise, once the step is trained: equal to the last bit, where this machine computes as the learner's did

Invariant: only a machine that computes alike (`record.computed`) can say that bits are wrong. Another one says so, and
compares nothing.
Called by `audit`. Left out: a learner of several ranks; one at several sites, for the reason that `obstacle` gives.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.audit.found import Found
from shoal.cli.audit.opened import BrokenError, Opened, naming
from shoal.cli.audit.work import gather_step
from shoal.protocol.messages import Computed
from shoal.shardcast.manifest import version_name

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


def obstacle(found: Found) -> str:
    """Why none of the steps can be run again."""
    if found.records and all(config.learner.sites for config in found.configs):
        return (
            "they were trained at several sites, and a record says how one of them computed; the moments of the others, and "
            "what rounding left over at each, are in no checkpoint that it names"
        )
    if found.records and all(record.computed.ranks > 1 for record in found.records):
        return "several ranks trained them, and one process sums in another order"
    return "no state before a step is at hand"


@contextmanager
def rerun(run: Opened, found: Found, step: int, scratch: Path) -> Iterator[Again]:
    """Yields once the step is trained and its weights are compared. Raises BrokenError."""
    import torch

    from shoal.learner.loop import Learner
    from shoal.learner.policy import Policy
    from shoal.learner.ranks import Ranks
    from shoal.learner.report import computed
    from shoal.model import numerics
    from shoal.model.dtype import temporarily_on
    from shoal.model.sources import resolve

    record, config = found.records[step], found.configs[step]
    section = config.learner.model_copy(update={"keep_versions": 2})
    config = config.model_copy(update={"learner": section})
    dtype = record.computed.dtype
    if step:
        kept = scratch / "checkpoints" / CHECKPOINT.format(step)
        kept.parent.mkdir(parents=True)
        kept.symlink_to((run.folder / "learner" / "checkpoints" / kept.name).resolve(), target_is_directory=True)
    with temporarily_on(record.computed.threads), naming(f"step {step}"):
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
    from blake3 import blake3

    from shoal.model.load import WEIGHTS

    found = blake3(max_threads=blake3.AUTO).update_mmap(again.versions / version_name(version) / WEIGHTS).hexdigest()
    if again.compared and found != digest:
        raise BrokenError(
            f"step {again.step}", f"run again, it does not give the published weights of version {version}"
        )
