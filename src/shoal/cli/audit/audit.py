"""The audit of a run, in order: the chain, its end, every entry, every file, a step again, proofs again, contributions.

Invariants: the first link that does not hold ends it. Nobody lost its place without an entry or a row that says why; rows
are the coordinator's own word, and only that they agree with each other and with the ledger is checked. Every figure of a
contribution is counted from files that passed. Where the run has a contract on a chain, it says of every account what the
coordinator put there, and no entry of the ledger is missing there. Left out: entries that other runs settled in it.
"""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from shoal.cli.audit.files import check_files
from shoal.cli.audit.opened import BrokenError, Opened, check_end, check_heads, naming, open_run, settings_of
from shoal.cli.audit.pay import Found, Pay
from shoal.cli.audit.work import Walk
from shoal.coordinator.checkers import MISMATCHES
from shoal.coordinator.judgement import ACCIDENTS, UNUSABLE
from shoal.coordinator.nodes import Member, Nodes
from shoal.coordinator.submissions import Submissions
from shoal.coordinator.trust import bets
from shoal.evidence import Process
from shoal.ledger.connection import Connection
from shoal.ledger.evm import KINDS, not_on_chain
from shoal.protocol.messages import Reason, ToleranceSpent

Say = Callable[[str], None]
SET_BACK_S = 300.0  # by which the coordinator's clock may have been set back


def audit(
    folder: Path,
    say: Say,
    random: Random,
    *,
    key: str = "",
    heads: Sequence[str] = (),
    export: Path | None = None,
    unsealed: bool = False,
    rerun: int = 1,
    proofs: int = 4,
    rpc: str = "",
) -> Found:
    """Check all of a run. Raises BrokenError.

    `key`: the coordinator's; "" takes the one that the ledger names. `heads`: those that the auditor knows. `export`: the
    ledger as JSON lines, instead of the database. `unsealed`: accept a ledger whose coordinator still runs or was killed.
    `rerun`: steps to train again. `proofs`: accepted submissions to judge again for each of these; 0: none at all.
    `rpc`: a node of the chain that holds the run's contract; "": the one that its config names.
    """
    run = open_run(folder, key=key, export=export)
    say(f"run {run.run}, coordinator {run.key}")
    signed = check_heads(run, heads)
    sealed = check_end(run, unsealed=unsealed)
    newest = f"{run.chain[-1].seq}:{run.chain[-1].digest}"
    say(f"ledger: {len(run.chain)} entries, head {newest}; {len(signed)} co-signed heads")
    say("tables: as sealed" if sealed else "tables: not sealed, not compared")
    walk = Walk(run)
    found = walk.walk()
    if sealed and run.connection is not None:
        check_standing(run, found, walk.pay, run.connection)
    elif walk.pay.dismissals:
        why = "dismissals: their evidence is in the tables, which are not compared"
        found.unproven[why] += len(walk.pay.dismissals)
    counts = f"{len(found.accepted)} accepted, {len(found.rejected)} rejected"
    say(f"submissions: {counts}; every file signed and as recorded")
    say(f"steps: {len(found.records)} trained, each on exactly the groups of its batch")
    if line := check_settled(run, rpc):
        say(line)
    for line in check_files(run, found):
        say(line)
    _again(run, found, rerun, proofs, random, say)
    for what, count in found.unproven.items():
        say(f"not checked: {count} {what}")
    for line in [*by_step(found), *by_node(found)]:
        say(line)
    return found


def _again(run: Opened, found: Found, steps: int, proofs: int, random: Random, say: Say) -> None:
    """Judge hard rejections. Run drawn steps again, and judge a sample of the submissions of the version each began with."""
    from shoal.cli.audit.again import judge_again, judge_rejections, rerun, states

    if line := judge_rejections(run, found, limit=proofs):
        say(line)
    if not steps:
        return
    possible = states(run, found)
    for step in sorted(random.sample(possible, min(steps, len(possible)))):
        with tempfile.TemporaryDirectory() as scratch, rerun(run, found, step, Path(scratch)) as again:
            if again.compared:
                say(f"step {step + 1}: run again, version {step + 1} is equal to the last bit")
            else:
                differs = [name for name, value in again.here if value != getattr(again.there, name)]
                say(
                    f"step {step + 1}: run again, not compared: this machine computes with another {', '.join(differs)}"
                )
            of_version = [one for one in found.accepted.values() if one.version == step]
            sample = random.sample(of_version, min(proofs, len(of_version)))
            judge_again(run, sample, again.before, again.there.dtype)
            say(f"proofs: {len(sample)} of {len(of_version)} submissions of version {step} judged again, all accepted")
    if not possible:
        say("steps: none can be run again: no state before one is at hand, or several ranks or sites trained them")


# --- states of members -----------------------------------------------------------------------------------------------


def check_standing(run: Opened, found: Found, pay: Pay, connection: Connection) -> None:
    """Raises BrokenError."""
    missed = Submissions(connection).count_missed()
    dismissed = {str(body["worker"]) for _, body, _ in pay.dismissals}
    for node in Nodes(connection).all():
        link = f"table nodes: {node.name}"
        if node.role == "worker":
            if node.evicted != (node.key in found.slashed):
                why = "banned, and no entry slashes it" if node.evicted else "slashed, and not banned"
                raise BrokenError(link, why)
            if node.state == "dismissed" and node.key not in dismissed:
                raise BrokenError(link, "dismissed, and no entry says so")
            if node.suspensions and not _may_be_suspended(node, found, missed.get(node.key, 0)):
                raise BrokenError(link, f"suspended, and nothing of it went wrong ({node.reason})")
        if node.role == "validator" and node.state in ("left", "banned"):
            _check_silent(run, node)
    for link, body, observed in pay.dismissals:
        spent = [(figures, config) for id, config in observed if (figures := _spent(connection, id)) is not None]
        process = Process()
        for figures, config in spent[-body["submissions"] :]:
            process = process.after(bets(figures, config))
        same = math.isclose(process.evidence, body["evidence"], rel_tol=1e-6)
        if process.observations != body["submissions"] or not same:
            why = f"the verdicts give evidence of {process.evidence:.3f} nats, not {body['evidence']:.3f}"
            raise BrokenError(link, why)


def _may_be_suspended(node: Member, found: Found, missed: int) -> bool:
    reasons = [one.reason for one in found.rejected.values() if one.worker == node.key]
    unusable = sum(reason in UNUSABLE for reason in reasons)
    return missed > 0 or unusable > ACCIDENTS or reasons.count(Reason.INEXACT) >= MISMATCHES


def _check_silent(run: Opened, node: Member) -> None:
    for entry, body in zip(run.chain, run.bodies, strict=True):
        judges = entry.kind in ("accepted", "rejected") and body["validator"] == node.key
        if judges and entry.time_s > node.state_s + SET_BACK_S:
            raise BrokenError(f"ledger entry {entry.seq}", f"judged by {node.name}, which had left")


def _spent(connection: Connection, id: str) -> ToleranceSpent | None:
    """Return the tolerance that a verdict reports as used; None if the verdict does not measure it."""
    told = json.loads(connection.value("SELECT verdict FROM submissions WHERE id = ?", id) or "{}")
    if told.get("spent") is None or told.get("replay") is not None:
        return None
    return ToleranceSpent.model_validate_json(json.dumps(told["spent"]))


# --- the contract on a chain -----------------------------------------------------------------------------------------


def check_settled(run: Opened, rpc: str) -> str:
    """A line about it, "" for a run without a contract. `rpc` "": the node that the run's own config names."""
    section = run.config.ledger
    if not section.contract:
        return ""
    rpc = rpc or settings_of(run.folder).ledger.rpc
    if not rpc:
        return f"chain: not compared with the contract {section.contract}: name a node of its chain with --rpc"
    from shoal.ledger.evm import open_contract

    link = f"contract {section.contract}"
    with naming(link):
        contract = open_contract(rpc, section.contract)
        known = {
            (event.kind, event.key, event.work, event.amount if event.kind == "credited" else 0)
            for event in contract.events()
        }
        lacking = not_on_chain(run.chain, known, contract)
        digests = {entry.digest for entry in run.chain}
        mine = {str(json.loads(entry.body)["key"]) for entry in run.chain if entry.kind == "registered"}
    if lacking:
        which = f"entry {lacking[0].seq} ({lacking[0].kind}) of the ledger, and {len(lacking) - 1} more"
        settle = "if the chain was away, settle them: shoal pool stake settle RUN"
        raise BrokenError(link, f"does not hold {which}; {settle}")
    foreign = sum(event[0] != "registered" and event[1] in mine and event[2] not in digests for event in known)
    held = sum(entry.kind in KINDS for entry in run.chain)
    more = f"; {foreign} events of its workers are of other runs, or not of this ledger" if foreign else ""
    return f"chain: the contract {section.contract} holds all {held} entries about accounts{more}"


# --- contributions ---------------------------------------------------------------------------------------------------


def by_node(found: Found) -> list[str]:
    """A line for each worker, and one for each validator."""
    lines = [f"{'node':20} {'accepted':>8} {'rejected':>8} {'tokens':>10} {'credited':>10} {'trained groups':>14}"]
    trained = Counter(found.accepted[id].worker for batch in found.batches[: len(found.records)] for id, _ in batch)
    rejected = Counter(one.worker for one in found.rejected.values())
    for key, name in sorted(found.names.items(), key=lambda item: item[1]):
        mine = [one for one in found.accepted.values() if one.worker == key]
        if found.roles[key] == "worker":
            credited = sum(one.tokens for one in mine if found.credit.get(one.id) == "credited")
            tokens = sum(one.tokens for one in mine)
            figures = f"{len(mine):8} {rejected[key]:8} {tokens:10,} {credited:10,} {trained[key]:14,}"
            lines.append(f"{name:20} {figures}" + ("  slashed" if key in found.slashed else ""))
        if found.roles[key] == "validator":
            judged = [one for one in found.accepted.values() if one.validator == key]
            lines.append(f"{name:20} {len(judged):8} accepted by it, {sum(one.full for one in judged)} prefilled whole")
    return lines


def by_step(found: Found) -> list[str]:
    """A line for each trained step: groups and tokens of each worker."""
    lines = []
    for step in range(len(found.records)):
        groups: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for id, group in found.batches[step]:
            one = found.accepted[id]
            groups[found.names[one.worker]] += 1
            tokens[found.names[one.worker]] += one.group_tokens[group]
        parts = [f"{name} {groups[name]} groups, {tokens[name]:,} tokens" for name in sorted(groups)]
        lines.append(f"step {step + 1}: {'; '.join(parts)}")
    return lines
