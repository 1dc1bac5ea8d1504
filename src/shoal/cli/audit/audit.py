"""The audit of a run, in order: the chain, its end, every entry, every file, a step again, proofs again, contributions.

Invariant: the first link that does not hold ends it. Called by `shoal audit`.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from shoal.cli.audit.chain import check_end, check_heads
from shoal.cli.audit.contribution import by_node, by_step
from shoal.cli.audit.files import check_files
from shoal.cli.audit.found import Found
from shoal.cli.audit.opened import Opened, open_run
from shoal.cli.audit.settled import check_settled
from shoal.cli.audit.standing import check_standing
from shoal.cli.audit.work import Walk

Say = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    key: str = ""  # of the coordinator; "": the one that the ledger names
    heads: Sequence[str] = ()  # that the auditor knows
    export: Path | None = None  # the ledger as JSON lines, instead of the database
    unsealed: bool = False  # accept a ledger whose coordinator still runs or was killed
    rerun: int = 1  # steps to run again
    rpc: str = ""  # a node of the chain that holds the run's contract; "": the one that its config names
    proofs: int = 4  # accepted submissions to judge again for each of these steps; 0: no rejected ones either


def audit(folder: Path, asked: Asked, random: Random, say: Say) -> Found:
    """Raises BrokenError."""
    run = open_run(folder, key=asked.key, export=asked.export)
    say(f"run {run.run}, coordinator {run.key}")
    heads = check_heads(run, asked.heads)
    sealed = check_end(run, unsealed=asked.unsealed)
    newest = f"{run.chain[-1].seq}:{run.chain[-1].digest}"
    say(f"ledger: {len(run.chain)} entries, head {newest}; {len(heads)} co-signed heads")
    say("tables: as sealed" if sealed else "tables: not sealed, not compared")
    walk = Walk(run)
    found = walk.walk()
    if sealed and run.connection is not None:
        check_standing(run, found, walk.pay, run.connection)
    elif walk.pay.dismissals:
        found.unproven["dismissals: their evidence is in the tables, which are not compared"] += len(
            walk.pay.dismissals
        )
    say(
        f"submissions: {len(found.accepted)} accepted, {len(found.rejected)} rejected; every file signed and as recorded"
    )
    say(f"steps: {len(found.records)} trained, each on exactly the groups of its batch")
    if line := check_settled(run, asked.rpc):
        say(line)
    for line in check_files(run, found):
        say(line)
    _again(run, found, asked, random, say)
    for what, count in found.unproven.items():
        say(f"not checked: {count} {what}")
    for line in [*by_step(found), *by_node(found)]:
        say(line)
    return found


def _again(run: Opened, found: Found, asked: Asked, random: Random, say: Say) -> None:
    """Judge hard rejections. Run drawn steps again, and judge a sample of the submissions of the version each began with."""
    from shoal.cli.audit.proofs import judge_again, judge_rejections

    if line := judge_rejections(run, found, limit=asked.proofs):
        say(line)
    if not asked.rerun:
        return
    from shoal.cli.audit.rerun import obstacle, rerun, states

    possible = states(run, found)
    for step in sorted(random.sample(possible, min(asked.rerun, len(possible)))):
        with tempfile.TemporaryDirectory() as scratch, rerun(run, found, step, Path(scratch)) as again:
            if again.compared:
                say(f"step {step}: run again, version {step + 1} is equal to the last bit")
            else:
                differs = [name for name in type(again.here).model_fields if _differs(again, name)]
                say(f"step {step}: run again, not compared: this machine computes with another {', '.join(differs)}")
            of_version = [one for one in found.accepted.values() if one.version == step]
            sample = random.sample(of_version, min(asked.proofs, len(of_version)))
            judge_again(run, sample, again.before, again.there.dtype)
            say(f"proofs: {len(sample)} of {len(of_version)} submissions of version {step} judged again, all accepted")
    if not possible:
        say(f"steps: none can be run again: {obstacle(found)}")


def _differs(again: object, name: str) -> bool:
    return bool(getattr(again.here, name) != getattr(again.there, name))  # type: ignore[attr-defined]
