"""Lies that a coordinator can sign with its own key to cheat or frame a worker, each with the audit's error.

Each lie is written as a modified coordinator would write it: the chain is signed, validators have co-signed its heads,
and the tables are sealed. The coordinator cannot sign for workers, so each rollout file added here is signed by its
worker.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.trust import forging as forged
from benchmarks.trust.forging import Body, Ledger

from shoal.learner.report import DOMAIN
from shoal.ledger.chain import sign_opinion
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.messages import Opinion, Reason
from shoal.store.folder import Folder
from shoal.store.rollouts import read_submission, write_submission

from .recorded import ALICE, BOB, COORDINATOR, LEARNER, MALLORY, RUN, SECOND, SPENT, VALIDATOR


@contextmanager
def forging(folder: Path) -> Iterator[Ledger]:
    with forged.forging(folder, COORDINATOR, VALIDATOR) as ledger:
        yield ledger


def file(ledger: Ledger, key: Identity, number: int) -> Body:
    """Add another honest and signed file of this worker for the last step. Return the facts for its entry."""
    known = [body for kind, body in ledger.entries if kind == "accepted" and body["worker"] == key.public][-1]
    store, id = Folder(ledger.folder / "coordinator" / "store"), f"{key.public[:16]}-{number:06d}"
    honest = read_submission(store.get("submissions", known["file"]), max_rows=64, max_tokens=64)
    header = honest.header.model_copy(update={"submission": number, "nonce": f"{number:032x}"})
    file = store.put("submissions", write_submission(header, honest.rows, key))
    facts = {name: known[name] for name in ("worker", "step", "version", "full", "validator")}
    return facts | {"submission": id, "nonce": header.nonce, "groups": header.groups, "file": file}


# --- framed workers --------------------------------------------------------------------------------------------------


def opinion(validator: Identity, facts: Body, reason: str | None, **fields: Any) -> str:
    """Let a validator sign an opinion on the file that these facts name."""
    about = {"run": RUN, "submission": facts["submission"], "file": facts["file"], "reason": reason and Reason(reason)}
    return sign_opinion(Opinion(**(about | fields)), validator).model_dump_json()


def reject(ledger: Ledger, facts: Body, reason: str, opinions: Sequence[str] | None = None) -> Body:
    """Reject a file. By default two validators that collude with the coordinator sign the reason."""
    if opinions is None:
        signers = (SECOND, VALIDATOR)
        signed = {"reason": reason} if reason != "spending" else {"reason": None, "spent": SPENT, "accepted": "ab" * 32}
        opinions = [opinion(validator, facts, **signed) for validator in signers]
    body = facts | {"validator": VALIDATOR.public, "reason": reason, "detail": "", "opinions": list(opinions)}
    ledger.add("rejected", body)
    return body


def slash(ledger: Ledger, facts: Body, reason: str, opinions: Sequence[str] | None = None) -> None:
    """Reject Bob's file and slash him."""
    body = reject(ledger, facts, reason, opinions)
    ledger.add("slashed", {name: value for name, value in body.items() if name not in ("detail", "opinions")})
    ledger.set_node(BOB, state="banned")


def slash_by(ledger: Ledger, *signed: tuple[Identity, Body]) -> None:
    """Slash Bob for a proof, with opinions that these validators signed with changed facts."""
    facts = file(ledger, BOB, 5)
    slash(ledger, facts, "proof", [opinion(validator, facts | other, "proof") for validator, other in signed])


def slash_against_acceptances(ledger: Ledger) -> None:
    facts = file(ledger, BOB, 5)
    accepted = [opinion(SECOND, facts, None, accepted="ab" * 32)]
    slash(ledger, facts, "proof", [*accepted, opinion(VALIDATOR, facts, "proof")])


def slash_with_anothers_file(ledger: Ledger) -> None:
    """Slash Bob for another worker's file, with a task number that was never assigned and a nonce of zeros."""
    theirs = {name: value for name, value in ledger.find("rejected", reason="proof").items() if name != "opinions"}
    facts = {"worker": BOB.public, "submission": f"{BOB.public[:16]}-000077", "nonce": "0" * 32}
    slash(ledger, {**theirs, **facts}, "proof")


def slash_with_no_rollout_file(ledger: Ledger) -> None:
    empty = Folder(ledger.folder / "coordinator" / "store").put("submissions", b"PAR1 no rollouts PAR1")
    slash(ledger, file(ledger, BOB, 5) | {"file": empty}, "proof")


def slash_nobody(ledger: Ledger) -> None:
    slashed, lost = ledger.find("slashed"), ledger.find("forfeited")
    ledger.drop(slashed, lost)
    ledger.add("credited", lost)
    ledger.set_node(MALLORY, state="active")


def dismissal(ledger: Ledger, evidence: float, submissions: int) -> None:
    facts = reject(ledger, file(ledger, BOB, 5), "spending")
    body = {"worker": BOB.public, "submission": facts["submission"], "submissions": submissions}
    ledger.add("dismissed", body | {"evidence": evidence})


def dismiss_without_rejection(ledger: Ledger) -> None:
    known = ledger.find("accepted", worker=BOB.public)["submission"]
    body = {"worker": BOB.public, "submission": known, "submissions": 1, "evidence": 99.0, "bets": []}
    ledger.add("dismissed", body)


# --- pay, batches ----------------------------------------------------------------------------------------------------


def forfeit_before_slash(ledger: Ledger) -> None:
    body = ledger.find("forfeited")
    ledger.drop(body)
    ledger.add("forfeited", body, after=ledger.find("rejected", worker=MALLORY.public, reason="bounds"))


def pay_a_stranger(ledger: Ledger) -> None:
    eve = "ee" * 32
    ledger.add("registered", {"key": eve, "name": "eve", "role": "worker"})
    ledger.add("credited", {"worker": eve, "submissions": [f"{eve[:16]}-000000"], "tokens": 12})


def pay_for_rejected(ledger: Ledger) -> None:
    id = ledger.find("rejected", reason="bounds")["submission"]
    ledger.add("credited", {"worker": MALLORY.public, "submissions": [id], "tokens": 12})


def judge_before_joining(ledger: Ledger) -> None:
    body = ledger.find("registered", key=VALIDATOR.public)
    ledger.drop(body)
    ledger.add("registered", body, after=ledger.find("accepted"))


def batch_with(ledger: Ledger, submission: str, group: int = 0) -> None:
    """Put another group first in the last batch."""
    ledger.find("batch", step=2)["groups"][0] = [submission, group]


def train_with(ledger: Ledger, **computed: object) -> None:
    """Let the learner sign a record of step 1 with other properties of its computation."""
    body = ledger.find("trained", step=0)
    record = json.loads(Signed.model_validate_json(body["record"]).open(LEARNER.public, domain=DOMAIN))
    record["computed"] |= computed
    body["record"] = Signed.make(LEARNER, json.dumps(record), domain=DOMAIN).model_dump_json()


def book(run: Ledger, *bookings: tuple[str, int], key: str = ALICE.public) -> None:
    """Add entries about an account."""
    for kind, amount in bookings:
        run.add(kind, {"key": key, "amount": amount})


def all_credited(ledger: Ledger, key: Identity | None = None) -> list[Body]:
    credited = [body for kind, body in ledger.entries if kind == "credited"]
    return [body for body in credited if key is None or body["worker"] == key.public]


# By name: a function that writes the lie, and a pattern that matches the audit's error.
FORGERIES: dict[str, tuple[Callable[[Ledger], None], str]] = {
    "forfeit without slash": (
        lambda run: run.change_kind("forfeited", run.find("credited", worker=ALICE.public)),
        "neither slashed nor dismissed",
    ),
    "forfeit before slash": (forfeit_before_slash, "neither slashed nor dismissed"),
    "no pay at the end": (lambda run: run.drop(all_credited(run, BOB)[-1]), "neither paid nor forfeited"),
    "no pay although later checks cover the work": (
        lambda run: run.drop(all_credited(run, ALICE)[0]),
        "does not pay .*, which later checks cover",
    ),
    "pay nobody": (lambda run: run.drop(*all_credited(run)), "does not pay"),
    "no forfeit after a slash": (lambda run: run.drop(run.find("forfeited")), "neither paid nor forfeited"),
    "pay twice": (
        lambda run: run.add("credited", dict(all_credited(run, ALICE)[0])),
        "not an accepted, unsettled submission",
    ),
    "pay and forfeit": (
        lambda run: run.add("forfeited", dict(all_credited(run, BOB)[0])),
        "neither slashed nor dismissed",
    ),
    "pay another": (
        lambda run: all_credited(run, ALICE)[0].update(worker=BOB.public),
        "not an accepted, unsettled submission",
    ),
    "pay a stranger": (pay_a_stranger, "not an accepted, unsettled submission"),
    "pay for nothing": (
        lambda run: run.add("credited", {"worker": ALICE.public, "submissions": [], "tokens": 0}),
        "names no submission",
    ),
    "pay for rejected": (pay_for_rejected, "not an accepted, unsettled submission"),
    "pay more": (lambda run: all_credited(run, ALICE)[0].update(tokens=999), "the validators counted"),
    "pay the slashed": (lambda run: run.change_kind("credited", run.find("forfeited")), "which its worker lost"),
    "slash with another's file": (slash_with_anothers_file, "says worker"),
    "slash with another number": (
        lambda run: slash(run, file(run, BOB, 5) | {"submission": f"{BOB.public[:16]}-000006"}, "sampling"),
        "says submission 5, but the ledger says 6",
    ),
    "slash with another nonce": (
        lambda run: slash(run, file(run, BOB, 5) | {"nonce": "0" * 32}, "sampling"),
        "says nonce",
    ),
    "slash with another number of groups": (
        lambda run: slash(run, file(run, BOB, 5) | {"groups": 3}, "tasks"),
        "says groups",
    ),
    "slash with another version": (
        lambda run: slash(run, file(run, BOB, 5) | {"version": 1}, "proof"),
        "says policy_version",
    ),
    "slash with no rollout file": (slash_with_no_rollout_file, "not a readable rollout file"),
    "slash by one validator": (lambda run: slash_by(run, (VALIDATOR, {})), "that only one validator signed"),
    "slash by one validator twice": (
        lambda run: slash_by(run, (VALIDATOR, {}), (VALIDATOR, {})),
        "two opinions of one validator",
    ),
    "slash with an opinion on another file": (
        lambda run: slash_by(run, (SECOND, {"file": "ab" * 32}), (VALIDATOR, {})),
        "or one on something else",
    ),
    "slash with an opinion on another submission": (
        lambda run: slash_by(run, (SECOND, {"submission": f"{BOB.public[:16]}-000001"}), (VALIDATOR, {})),
        "or one on something else",
    ),
    "slash with a worker's opinion": (
        lambda run: slash_by(run, (ALICE, {}), (VALIDATOR, {})),
        "was not registered as validator before",
    ),
    "slash without opinions": (lambda run: slash_by(run), "holds 0 opinions"),
    "slash with an invented opinion": (
        lambda run: run.find("rejected", reason="proof")["opinions"].insert(0, run.find("accepted")["opinions"][0]),
        "or one on something else",
    ),
    "reject what as many validators accept": (slash_against_acceptances, "does not stand"),
    "an opinion that was changed": (
        lambda run: run.find("accepted").update(
            opinions=[run.find("accepted")["opinions"][0].replace("3.0", "2.0")],
        ),
        "not an opinion that",
    ),
    "slash for a soft reason": (lambda run: slash(run, file(run, BOB, 5), "bounds"), "without a hard rejection"),
    "slash with other facts": (lambda run: run.find("slashed").update(file="ab" * 32), "with facts that differ"),
    "slash nobody": (slash_nobody, "nobody is slashed for"),
    "slash another": (lambda run: run.find("slashed").update(worker=BOB.public), "without a hard rejection"),
    "reject with another's file": (
        lambda run: reject(run, file(run, BOB, 5) | {"file": run.find("rejected", reason="bounds")["file"]}, "bounds"),
        "says step 1, but the ledger says 2",
    ),
    "dismiss without rejection": (dismiss_without_rejection, "without a rejection of .* for spending"),
    "dismiss nobody": (lambda run: reject(run, file(run, BOB, 5), "spending"), "nobody is dismissed for"),
    "ban": (lambda run: run.set_node(BOB, state="banned"), "table nodes: bob: banned, but no entry slashes it"),
    "readmit": (lambda run: run.set_node(MALLORY, state="active"), "table nodes: mallory: slashed, but not banned"),
    "dismiss in the table": (
        lambda run: run.set_node(BOB, state="dismissed"),
        "table nodes: bob: dismissed, but no entry dismisses it",
    ),
    "suspend": (
        lambda run: run.set_node(BOB, suspensions=1, suspended_until_s=2e9, state="suspended"),
        "table nodes: bob: suspended, but nothing in its record explains it",
    ),
    "judged by nobody": (
        lambda run: run.find("rejected", reason="bounds").update(validator="ee" * 32),
        "was not registered as validator before",
    ),
    "judged by a worker": (
        lambda run: run.find("rejected", reason="bounds").update(validator=BOB.public),
        "was not registered as validator before",
    ),
    "judged before its validator joined": (judge_before_joining, "was not registered as validator before"),
    "judged after its validator left": (
        lambda run: run.set_node(VALIDATOR, state="left", state_s=1_600_000_000.0),
        "judged by validator, which had already left",
    ),
    "batch of rejected": (
        lambda run: batch_with(run, run.find("rejected", reason="bounds")["submission"]),
        "was not accepted",
    ),
    "batch of unjudged": (lambda run: batch_with(run, f"{BOB.public[:16]}-000044"), "was not accepted"),
    "a group before the first": (
        lambda run: batch_with(run, run.find("batch", step=2)["groups"][1][0], -1),
        "group -1 of .* is in two batches, or was not accepted",
    ),
    "the same group twice": (lambda run: batch_with(run, *run.find("batch", step=2)["groups"][1]), "is in two batches"),
    "batch after the end": (
        lambda run: run.add("batch", run.find("batch", step=2) | {"step": 3}),
        "is a batch for step 4, but the run has 3 steps",
    ),
    "step after the end": (lambda run: run.add("trained", dict(run.find("trained", step=2))), "records step 3"),
    "version after the end": (
        lambda run: run.add("policy", {"version": 4, "digest": "ab" * 32}),
        "before the batch that it was trained on is full",
    ),
    "work after the end": (
        lambda run: reject(run, file(run, BOB, 5) | {"step": 3}, "bounds"),
        "is for step 4, which was not open",
    ),
    "version before its step": (
        lambda run: run.add("policy", {"version": 3, "digest": "ab" * 32}, after=run.find("policy", version=0)),
        "before the batch that it was trained on is full",
    ),
    "a body that no parser can read": (
        lambda run: run.write("[" * 100_000 + "]" * 100_000, run.find("started")),
        "ledger entry 1: ",
    ),
    "a body that is not an object": (lambda run: run.write("7", run.find("batch", step=1)), "is not a JSON object"),
    "a config that no parser can read": (
        lambda run: run.find("started").update(config="a = " + "[" * 100_000),
        "ledger entry 1: ",
    ),
    "a start without a run": (lambda run: run.find("started").pop("run"), "ledger entry 1: 'run'"),
    "a member without a role": (lambda run: run.find("registered").pop("role"), "'role'"),
    "a name that is a number": (lambda run: run.find("registered").update(name=5), "its name is 5"),
    "a version that is not an integer": (
        lambda run: run.add("policy", {"version": 2.5, "digest": "ab" * 32}),
        "its version is 2.5",
    ),
    "no threads": (lambda run: train_with(run, threads=0), "computed.threads"),
    "more threads than a machine can start": (lambda run: train_with(run, threads=10**6), "computed.threads"),
    "withdraw more than was unstaked": (
        lambda run: book(run, ("staked", 7), ("unstaked", 5), ("withdrawn", 7)),
        "gets 5 back, not 7",
    ),
    "withdraw nothing, so that the stake vanishes": (
        lambda run: book(run, ("staked", 7), ("unstaked", 5), ("withdrawn", 0)),
        "gets 5 back, not 0",
    ),
    "withdraw before the time": (
        lambda run: book(run, ("staked", 7), ("unstaked", 5), ("withdrawn", 5)),
        "can withdraw from",
    ),
    "withdraw what a slash took": (
        lambda run: [
            book(run, ("withdrawn", 5), key=MALLORY.public),
            run.add("staked", {"key": MALLORY.public, "amount": 5}, after=run.find("rejected", reason="bounds")),
            run.add("unstaked", {"key": MALLORY.public, "amount": 5}, after=run.find("staked")),
        ][0],
        "has no stake that is leaving",
    ),
    "unstake more than was staked": (lambda run: book(run, ("staked", 7), ("unstaked", 8)), "has 7 at stake"),
    "stake less than nothing": (lambda run: book(run, ("staked", -7)), "not a whole number of at least 0"),
    "reclaim more than was deposited": (
        lambda run: book(run, ("deposited", 5), ("reclaimed", 6), key="ab" * 32),
        "gets 5 back, not 6",
    ),
    "reclaim nothing, so that the deposit vanishes": (
        lambda run: book(run, ("deposited", 5), ("reclaimed", 0), key="ab" * 32),
        "gets 5 back, not 0",
    ),
    "a new kind": (
        lambda run: run.add("pardoned", {"worker": MALLORY.public}),
        "has an unknown kind, pardoned",
    ),
}
