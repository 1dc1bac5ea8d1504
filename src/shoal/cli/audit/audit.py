"""Audit a run: check the chain, its end, and every entry and file; recompute samples; report contributions.

Invariants: every claim of the ledger (a digest, file, version, table, head, amount) ends as yes, no or not compared, and
`Checks` counts all three. The audit stops at the first "no", a broken link. A ledger entry or a table row explains each
eviction, dismissal and suspension. Rows are only the coordinator's claims, so they are compared with each other and with
the ledger. Contributions are counted only from files that passed. If the run has a contract on a chain, that contract
holds every ledger entry about accounts.
Left out: entries that other runs settled in the same contract.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from random import Random

from shoal.cli.audit.files import check_files
from shoal.cli.audit.pay import AuditState
from shoal.cli.audit.run import AuditedRun, BrokenError, Checks, check_end, check_heads, checking, open_run, settings_of
from shoal.cli.audit.walk import Walk
from shoal.coordinator.checkers import MISMATCHES
from shoal.coordinator.judgement import ACCIDENTS
from shoal.coordinator.nodes import Member, Nodes
from shoal.coordinator.submissions import Submissions
from shoal.ledger.connection import Connection
from shoal.ledger.evm import KINDS, not_on_chain
from shoal.protocol.messages import UNUSABLE, Reason

Say = Callable[[str], None]
CLOCK_S = 300.0  # how far the coordinator's clock may have been set back


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
    checks: Checks | None = None,
) -> AuditState:
    """Check a whole run and print a report. Raise BrokenError.

    `key`: the coordinator's; "": the key in the ledger. `heads`: heads of the ledger that the auditor knows. `export`:
    the ledger as JSON lines, instead of the database. `unsealed`: accept a ledger whose coordinator still runs or was
    killed. `rerun`: how many steps to train again. `proofs`: how many accepted submissions to judge again for each of
    these steps; 0: judge no submissions and no hard rejections. `rpc`: a node of the chain that holds the run's
    contract; "": the node in the run's config. `checks`: counts the outcomes.
    """
    checks = checks or Checks()
    run = replace(open_run(folder, key=key, export=export), checks=checks)
    checks.passed += len(run.chain)
    say(f"run {run.run}, coordinator {run.key}")
    signed = check_heads(run, heads)
    checks.passed += len(signed) + len(heads)
    sealed = check_end(run, unsealed=unsealed)
    newest = f"{run.chain[-1].seq}:{run.chain[-1].digest}"
    say(f"ledger: {len(run.chain)} entries, head {newest}; {len(signed)} co-signed heads")
    say("tables: as sealed" if sealed else "tables: not compared")
    walk = Walk(run)
    state = walk.walk()
    if sealed and run.connection is not None:
        with checking("tables"):  # their rows are the coordinator's, so they may hold anything
            check_members(run, state, walk.pay.ever_dismissed, run.connection)
    counts = f"{len(state.accepted)} accepted, {len(state.rejected)} rejected"
    say(f"submissions: {counts}; every file is signed and matches its entry")
    for change in state.changes:
        say(f"config: a restart changed {change}")
    say(f"steps: {len(state.records)} trained, each on exactly the groups of its batch")
    if line := check_settled(run, rpc):
        say(line)
    with checking("files"):
        lines = check_files(run, state)
    for line in lines:
        say(line)
    _recompute(run, state, rerun, proofs, random, say)
    for what, count in (checks.needed + checks.unproven).items():
        say(f"{'NOT COMPARED' if what in checks.needed else 'not compared'}: {count} {what}")
    for line in [*by_step(state), *by_node(state)]:
        say(line)
    return state


def _recompute(run: AuditedRun, state: AuditState, steps: int, proofs: int, random: Random, say: Say) -> None:
    """Judge hard rejections again. Train randomly drawn steps again, and judge a sample of each step's submissions."""
    from shoal.cli.audit.recompute import judge_again, judge_rejections, rerun, rerunnable_steps

    if line := judge_rejections(run, state, limit=proofs):
        say(line)
    wanted, compared, reached = min(steps, len(state.records)), set[int](), {0}
    possible = rerunnable_steps(run, state) if wanted else []
    for step in random.sample(possible, len(possible)):  # more than wanted, if the first ones cannot be compared
        if len(compared) == wanted:
            break
        with tempfile.TemporaryDirectory() as scratch, rerun(run, state, step, Path(scratch)) as result:
            say(f"step {step + 1}: trained again; {result.outcome}")
            if result.compared:
                compared.add(step)
            if result.state_compared:
                reached.add(step + 1)
            of_version = [submission for submission in state.accepted.values() if submission.version == step]
            sample = random.sample(of_version, min(proofs, len(of_version)))
            judge_again(run, state, sample, result.before, result.dtype)
            say(f"proofs: {len(sample)} of {len(of_version)} submissions of version {step} judged again, all accepted")
            state.checks.passed += len(sample) + result.compared + result.state_compared
    for step in sorted(compared - reached):  # `reached`: the steps before which the optimizer's state was compared
        state.checks.unproven[f"states of the optimizer: that before step {step + 1} is the learner's claim"] += 1
    if lacking := wanted - len(compared):
        why = "a checkpoint or the weights after the step are gone, or several sites trained"
        state.checks.needed[f"steps to train again, with proofs of their versions: {why}"] += lacking


# --- members' states in the tables -----------------------------------------------------------------------------------


def check_members(run: AuditedRun, state: AuditState, dismissed: Set[str], connection: Connection) -> None:
    """Compare members' states with the ledger. `dismissed`: workers that an entry dismisses. Raise BrokenError."""
    missed, nodes = Submissions(connection).count_missed(), Nodes(connection).all()
    state.checks.passed += len(nodes)
    for node in nodes:
        link = f"table nodes: {node.name}"
        if node.role == "worker":
            if node.evicted != (node.key in state.slashed):
                why = "banned, but no entry slashes it" if node.evicted else "slashed, but not banned"
                raise BrokenError(link, why)
            if node.state == "dismissed" and node.key not in dismissed:
                raise BrokenError(link, "dismissed, but no entry dismisses it")
            if node.suspensions and not _may_be_suspended(node, state, missed.get(node.key, 0)):
                raise BrokenError(link, f"suspended, but nothing in its record explains it ({node.reason})")
        if node.role == "validator" and node.state in ("left", "banned"):
            _check_no_later_verdict(run, node)


def _may_be_suspended(node: Member, state: AuditState, missed: int) -> bool:
    confirmed = (rejected for rejected in state.rejected.values() if rejected.confirmed)
    reasons = [rejected.reason for rejected in confirmed if rejected.worker == node.key]
    unusable = sum(reason in UNUSABLE for reason in reasons)
    return missed > 0 or unusable > ACCIDENTS or reasons.count(Reason.INEXACT) >= MISMATCHES


def _check_no_later_verdict(run: AuditedRun, node: Member) -> None:
    for entry, body in zip(run.chain, run.bodies, strict=True):
        judges = entry.kind in ("accepted", "rejected") and body["validator"] == node.key
        if judges and entry.time_s > node.state_s + CLOCK_S:
            raise BrokenError(f"ledger entry {entry.seq}", f"judged by {node.name}, which had already left")


# --- the contract on a chain -----------------------------------------------------------------------------------------


def check_settled(run: AuditedRun, rpc: str) -> str:
    """Compare the ledger with the run's contract. Return a line for the report, or "" for a run without a contract.

    `rpc`: a node of the chain; "": the node in the run's config. Raise BrokenError.
    """
    section = run.config.ledger
    if not section.contract:
        return ""
    with checking("config.toml"):
        rpc = rpc or settings_of(run.folder).ledger.rpc
    if not rpc:
        run.checks.unproven["contracts: no node of the chain is known"] += 1
        return f"chain: the contract {section.contract} is not compared; name a node of its chain with --rpc"
    from shoal.ledger.evm import open_contract

    link = f"contract {section.contract}"
    with checking(link):
        contract = open_contract(rpc, section.contract)
        known = {
            (event.kind, event.key, event.work, event.amount if event.kind == "credited" else 0)
            for event in contract.events()
        }
        lacking = not_on_chain(run.chain, known, contract)
        digests = {entry.digest for entry in run.chain}
        members = {str(json.loads(entry.body)["key"]) for entry in run.chain if entry.kind == "registered"}
    if lacking:
        which = f"entry {lacking[0].seq} ({lacking[0].kind}) of the ledger, and {len(lacking) - 1} more"
        settle = "if the chain was unreachable, settle them: shoal pool stake settle RUN"
        raise BrokenError(link, f"lacks {which}; {settle}")
    run.checks.passed += 1
    foreign = sum(event[0] != "registered" and event[1] in members and event[2] not in digests for event in known)
    entries = sum(entry.kind in KINDS for entry in run.chain)
    more = (
        f"; {foreign} of its events name members of this run but match no entry: they belong to other runs, or this "
        "ledger lacks their entries"
        if foreign
        else ""
    )
    return f"chain: the contract {section.contract} holds all {entries} entries about accounts{more}"


# --- contributions ---------------------------------------------------------------------------------------------------


def by_node(state: AuditState) -> list[str]:
    """Return a line for each worker and each validator."""
    lines = [f"{'node':20} {'accepted':>8} {'rejected':>8} {'tokens':>10} {'credited':>10} {'trained groups':>14}"]
    trained = Counter(state.accepted[id].worker for batch in state.batches[: len(state.records)] for id, _ in batch)
    rejections = Counter(rejected.worker for rejected in state.rejected.values())
    for key, name in sorted(state.names.items(), key=lambda item: item[1]):
        if state.roles[key] == "worker":
            accepted = [submission for submission in state.accepted.values() if submission.worker == key]
            credited = sum(each.tokens for each in accepted if state.credit.get(each.id) == "credited")
            tokens = sum(each.tokens for each in accepted)
            figures = f"{len(accepted):8} {rejections[key]:8} {tokens:10,} {credited:10,} {trained[key]:14,}"
            lines.append(f"{name:20} {figures}" + ("  slashed" if key in state.slashed else ""))
        if state.roles[key] == "validator":
            judged = [submission for submission in state.accepted.values() if submission.validator == key]
            whole = sum(submission.full for submission in judged)
            lines.append(f"{name:20} {len(judged):8} accepted by it, {whole} prefilled whole")
    return lines


def by_step(state: AuditState) -> list[str]:
    """Return a line for each trained step: the groups and tokens of each worker."""
    lines = []
    for step in range(len(state.records)):
        groups: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for id, group in state.batches[step]:
            submission = state.accepted[id]
            groups[state.names[submission.worker]] += 1
            tokens[state.names[submission.worker]] += submission.group_tokens[group]
        parts = [f"{name} {groups[name]} groups, {tokens[name]:,} tokens" for name in sorted(groups)]
        lines.append(f"step {step + 1}: {'; '.join(parts)}")
    return lines
