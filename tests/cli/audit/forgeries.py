"""What a coordinator can write with its own key to take a worker's pay or to frame it: one lie each, and its error message.

Each lie is written as a modified coordinator would have: the chain is signed, validators have co-signed its heads, and the
tables are sealed. Only workers and validators sign their files; those that are added here are honest.
"""

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.coordinator.pool import TABLE_NAMES
from shoal.ledger.chain import Entry, Head, canonical_json, next_entry, open_head, sign_head
from shoal.ledger.connection import SqliteConnection, table_digest
from shoal.protocol.identity import Identity, Signed
from shoal.store.folder import Folder
from shoal.store.rollouts import read_submission, write_submission

from .recorded import ALICE, BOB, COORDINATOR, MALLORY, RUN, VALIDATOR

Body = dict[str, Any]


@dataclass
class Ledger:
    """The entries of a finished run, as (kind, body), and its tables. Tests change them."""

    folder: Path
    database: sqlite3.Connection
    entries: list[tuple[str, Body]] = field(default_factory=list)

    def find(self, kind: str, **wanted: object) -> Body:
        bodies = [body for each, body in self.entries if each == kind]
        return next(body for body in bodies if all(body[key] == value for key, value in wanted.items()))

    def index(self, body: Body) -> int:
        return next(at for at, (_, each) in enumerate(self.entries) if each is body)

    def drop(self, *bodies: Body) -> None:
        for body in bodies:
            del self.entries[self.index(body)]

    def add(self, kind: str, body: Body, after: Body | None = None) -> None:
        """Insert an entry after another, by default before the seal."""
        self.entries.insert(len(self.entries) - 1 if after is None else self.index(after) + 1, (kind, body))

    def set_node(self, key: Identity, **columns: object) -> None:
        for name, value in columns.items():
            self.database.execute(f"UPDATE nodes SET {name} = ? WHERE key = ?", [value, key.public])

    def file(self, key: Identity, number: int) -> Body:
        """Add another honest and signed file of this worker for the last step. Return the facts for its entry."""
        known = [body for kind, body in self.entries if kind == "accepted" and body["worker"] == key.public][-1]
        store, id = Folder(self.folder / "coordinator" / "store"), f"{key.public[:16]}-{number:06d}"
        honest = read_submission(store.get("submissions", known["file"]), max_rows=64, max_tokens=64)
        header = honest.header.model_copy(update={"submission": number, "nonce": f"{number:032x}"})
        file = store.put("submissions", write_submission(header, honest.rows, key))
        facts = {name: known[name] for name in ("worker", "step", "version", "full", "validator")}
        return facts | {"submission": id, "nonce": header.nonce, "groups": header.groups, "file": file}


@contextmanager
def forging(folder: Path) -> Iterator[Ledger]:
    """Yield the ledger of a run, then sign, co-sign and seal its changed entries."""
    database = sqlite3.connect(folder / "coordinator" / "pool.sqlite", isolation_level=None)
    for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        database.execute(f"DROP TRIGGER {name}")
    rows = database.execute("SELECT kind, body, time_s FROM ledger ORDER BY seq").fetchall()
    ledger = Ledger(folder, database, [(kind, json.loads(body)) for kind, body, _ in rows])
    yield ledger
    database.execute("DELETE FROM ledger")
    chain: list[Entry] = []
    heads: list[Signed] = []
    for kind, body in ledger.entries:
        if kind == "witnessed":
            head = open_head(Signed.model_validate_json(body["head"]), VALIDATOR.public)
            known = chain[min(head.seq, len(chain)) - 1]
            heads.append(sign_head(Head(run=RUN, seq=known.seq, digest=known.digest), VALIDATOR))
            body["head"] = heads[-1].model_dump_json()
        if kind == "sealed":
            body["tables"] = {name: table_digest(SqliteConnection(database), name) for name in TABLE_NAMES}
        time_s = rows[min(len(chain), len(rows) - 1)][2]
        chain.append(next_entry(chain[-1] if chain else None, kind, canonical_json(body), time_s, COORDINATOR))
        row = chain[-1].model_dump()
        database.execute(f"INSERT INTO ledger ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", [*row.values()])
    (folder / "validator" / "head.json").write_text(heads[-1].model_dump_json())
    database.close()


# --- stolen pay ------------------------------------------------------------------------------------------------------


def forfeit_without_slash(ledger: Ledger) -> None:
    body = ledger.find("credited", worker=ALICE.public)
    ledger.entries[ledger.index(body)] = "forfeited", body


def forfeit_before_slash(ledger: Ledger) -> None:
    body = ledger.find("forfeited")
    ledger.drop(body)
    ledger.add("forfeited", body, after=ledger.find("rejected", worker=MALLORY.public, reason="bounds"))


def no_pay_at_the_end(ledger: Ledger) -> None:
    ledger.drop([body for kind, body in ledger.entries if kind == "credited" and body["worker"] == BOB.public][-1])


def no_pay_when_covered(ledger: Ledger) -> None:
    ledger.drop(ledger.find("credited", worker=ALICE.public))


def pay_nobody(ledger: Ledger) -> None:
    ledger.drop(*[body for kind, body in ledger.entries if kind == "credited"])


def keep_what_was_lost(ledger: Ledger) -> None:
    ledger.drop(ledger.find("forfeited"))


# --- pay that nobody earned ------------------------------------------------------------------------------------------


def pay_twice(ledger: Ledger) -> None:
    ledger.add("credited", dict(ledger.find("credited", worker=ALICE.public)))


def pay_and_forfeit(ledger: Ledger) -> None:
    body = ledger.find("credited", worker=BOB.public)
    ledger.add("forfeited", dict(body))


def pay_another(ledger: Ledger) -> None:
    ledger.find("credited", worker=ALICE.public)["worker"] = BOB.public


def pay_a_stranger(ledger: Ledger) -> None:
    eve = "ee" * 32
    ledger.add("registered", {"key": eve, "name": "eve", "role": "worker"})
    ledger.add("credited", {"worker": eve, "submissions": [f"{eve[:16]}-000000"], "tokens": 12})


def pay_for_nothing(ledger: Ledger) -> None:
    ledger.add("credited", {"worker": ALICE.public, "submissions": [], "tokens": 0})


def pay_for_rejected(ledger: Ledger) -> None:
    id = ledger.find("rejected", reason="bounds")["submission"]
    ledger.add("credited", {"worker": MALLORY.public, "submissions": [id], "tokens": 12})


def pay_more(ledger: Ledger) -> None:
    ledger.find("credited", worker=ALICE.public)["tokens"] += 1


def pay_the_slashed(ledger: Ledger) -> None:
    body = ledger.find("forfeited")
    ledger.entries[ledger.index(body)] = "credited", body


# --- framed workers --------------------------------------------------------------------------------------------------


def reject(ledger: Ledger, facts: Body, reason: str) -> Body:
    body = facts | {"reason": reason, "detail": ""}
    ledger.add("rejected", body)
    return body


def slash(ledger: Ledger, facts: Body) -> None:
    ledger.add("slashed", {name: value for name, value in facts.items() if name != "detail"})
    ledger.set_node(BOB, state="banned")


def slash_with_anothers_file(ledger: Ledger) -> None:
    """With a task number that was never assigned, and a nonce of zeros."""
    theirs = ledger.find("rejected", reason="proof")
    facts = {"worker": BOB.public, "submission": f"{BOB.public[:16]}-000077", "nonce": "0" * 32}
    slash(ledger, reject(ledger, {**theirs, **facts}, "proof"))


def slash_with_another_number(ledger: Ledger) -> None:
    facts = ledger.file(BOB, 5) | {"submission": f"{BOB.public[:16]}-000006"}
    slash(ledger, reject(ledger, facts, "sampling"))


def slash_with_another_nonce(ledger: Ledger) -> None:
    slash(ledger, reject(ledger, ledger.file(BOB, 5) | {"nonce": "0" * 32}, "sampling"))


def slash_for_another_size(ledger: Ledger) -> None:
    facts = ledger.file(BOB, 5)
    slash(ledger, reject(ledger, facts | {"groups": facts["groups"] + 1}, "tasks"))


def slash_for_another_version(ledger: Ledger) -> None:
    slash(ledger, reject(ledger, ledger.file(BOB, 5) | {"version": 1}, "proof"))


def slash_with_a_file_that_is_none(ledger: Ledger) -> None:
    file = Folder(ledger.folder / "coordinator" / "store").put("submissions", b"PAR1 no rollouts PAR1")
    slash(ledger, reject(ledger, ledger.file(BOB, 5) | {"file": file}, "proof"))


def slash_as_replayed(ledger: Ledger) -> None:
    """With rollouts of another worker that were accepted."""
    theirs, facts = ledger.find("accepted", worker=ALICE.public), ledger.file(BOB, 5)
    store = Folder(ledger.folder / "coordinator" / "store")
    rows = read_submission(store.get("submissions", theirs["file"]), max_rows=64, max_tokens=64).rows
    header = read_submission(store.get("submissions", facts["file"]), max_rows=64, max_tokens=64).header
    facts["file"] = store.put("submissions", write_submission(header, rows, BOB))
    slash(ledger, reject(ledger, facts, "replayed"))


def slash_for_a_soft_reason(ledger: Ledger) -> None:
    slash(ledger, reject(ledger, ledger.file(BOB, 5), "bounds"))


def slash_by_other_facts(ledger: Ledger) -> None:
    ledger.find("slashed")["file"] = "ab" * 32


def slash_nobody(ledger: Ledger) -> None:
    slashed, lost = ledger.find("slashed"), ledger.find("forfeited")
    ledger.drop(slashed, lost)
    ledger.add("credited", lost)
    ledger.set_node(MALLORY, state="active")


def slash_another(ledger: Ledger) -> None:
    ledger.find("slashed")["worker"] = BOB.public


def reject_with_anothers_file(ledger: Ledger) -> None:
    reject(ledger, ledger.file(BOB, 5) | {"file": ledger.find("rejected", reason="bounds")["file"]}, "bounds")


def dismissal(ledger: Ledger, evidence: float, submissions: int) -> None:
    facts = reject(ledger, ledger.file(BOB, 5), "spending")
    body = {"worker": BOB.public, "submission": facts["submission"], "submissions": submissions, "bets": []}
    ledger.add("dismissed", body | {"evidence": evidence})


def dismiss_without_rejection(ledger: Ledger) -> None:
    known = ledger.find("accepted", worker=BOB.public)["submission"]
    body = {"worker": BOB.public, "submission": known, "submissions": 1, "evidence": 99.0, "bets": []}
    ledger.add("dismissed", body)


def reject_for_spending_and_dismiss_nobody(ledger: Ledger) -> None:
    reject(ledger, ledger.file(BOB, 5), "spending")


def ban(ledger: Ledger) -> None:
    ledger.set_node(BOB, state="banned")


def readmit(ledger: Ledger) -> None:
    ledger.set_node(MALLORY, state="active")


def dismiss_in_the_table(ledger: Ledger) -> None:
    ledger.set_node(BOB, state="dismissed")


def suspend(ledger: Ledger) -> None:
    ledger.set_node(BOB, suspensions=1, suspended_until_s=2e9, state="suspended")


# --- verdicts, batches, the run's end --------------------------------------------------------------------------------


def judged_by_nobody(ledger: Ledger) -> None:
    ledger.find("rejected", reason="bounds")["validator"] = "ee" * 32


def judged_by_a_worker(ledger: Ledger) -> None:
    ledger.find("rejected", reason="bounds")["validator"] = BOB.public


def judged_before_its_validator_joined(ledger: Ledger) -> None:
    body = ledger.find("registered", key=VALIDATOR.public)
    ledger.drop(body)
    ledger.add("registered", body, after=ledger.find("accepted"))


def judged_after_its_validator_left(ledger: Ledger) -> None:
    ledger.set_node(VALIDATOR, state="left", state_s=1_600_000_000.0)


def batch_of_rejected(ledger: Ledger) -> None:
    ledger.find("batch", step=2)["groups"][0] = [ledger.find("rejected", reason="bounds")["submission"], 0]


def batch_of_unjudged(ledger: Ledger) -> None:
    ledger.find("batch", step=2)["groups"][0] = [f"{BOB.public[:16]}-000044", 0]


def batch_of_one_group(ledger: Ledger) -> None:
    groups = ledger.find("batch", step=2)["groups"]
    groups[1] = groups[0]


def batch_after_the_end(ledger: Ledger) -> None:
    ledger.add("batch", ledger.find("batch", step=2) | {"step": 3})


def step_after_the_end(ledger: Ledger) -> None:
    ledger.add("trained", dict(ledger.find("trained", step=2)))


def version_after_the_end(ledger: Ledger) -> None:
    ledger.add("policy", {"version": 4, "digest": "ab" * 32})


def work_after_the_end(ledger: Ledger) -> None:
    reject(ledger, ledger.file(BOB, 5) | {"step": 3}, "bounds")


def version_before_its_step(ledger: Ledger) -> None:
    ledger.add("policy", {"version": 3, "digest": "ab" * 32}, after=ledger.find("policy", version=0))


def a_new_kind(ledger: Ledger) -> None:
    ledger.add("pardoned", {"worker": MALLORY.public})


FORGERIES: dict[Callable[[Ledger], None], str] = {
    forfeit_without_slash: "neither slashed nor dismissed",
    forfeit_before_slash: "neither slashed nor dismissed",
    no_pay_at_the_end: "neither paid nor forfeited",
    no_pay_when_covered: "does not pay .*, which later checks cover",
    pay_nobody: "does not pay",
    keep_what_was_lost: "neither paid nor forfeited",
    pay_twice: "is not accepted and unsettled work of",
    pay_and_forfeit: "neither slashed nor dismissed",
    pay_another: "is not accepted and unsettled work of",
    pay_a_stranger: "is not accepted and unsettled work of",
    pay_for_nothing: "names no submission",
    pay_for_rejected: "is not accepted and unsettled work of",
    pay_more: "the validators counted",
    pay_the_slashed: "which its worker lost",
    slash_with_anothers_file: "says worker",
    slash_with_another_number: "says submission 5, the ledger 6",
    slash_with_another_nonce: "says nonce",
    slash_for_another_size: "says groups",
    slash_for_another_version: "says policy_version",
    slash_with_a_file_that_is_none: "not a readable rollout file",
    slash_as_replayed: "no accepted file of its worker has the same rollouts",
    slash_for_a_soft_reason: "without a hard rejection",
    slash_by_other_facts: "with other facts",
    slash_nobody: "slashes nobody for",
    slash_another: "without a hard rejection",
    reject_with_anothers_file: "says step 1, the ledger 2",
    dismiss_without_rejection: "without a rejection of .* for spending",
    reject_for_spending_and_dismiss_nobody: "dismisses nobody for",
    ban: "table nodes: bob: banned, and no entry slashes it",
    readmit: "table nodes: mallory: slashed, and not banned",
    dismiss_in_the_table: "table nodes: bob: dismissed, and no entry says so",
    suspend: "table nodes: bob: suspended, and nothing of it went wrong",
    judged_by_nobody: "was not registered as validator before",
    judged_by_a_worker: "was not registered as validator before",
    judged_before_its_validator_joined: "was not registered as validator before",
    judged_after_its_validator_left: "judged by validator, which had left",
    batch_of_rejected: "was not accepted",
    batch_of_unjudged: "was not accepted",
    batch_of_one_group: "is in two batches",
    batch_after_the_end: "is not the batch of step 4 of 3",
    step_after_the_end: "records step 3",
    version_after_the_end: "before the batch that it was trained on is full",
    work_after_the_end: "is for step 4, which was not open",
    version_before_its_step: "before the batch that it was trained on is full",
    a_new_kind: "is of an unknown kind, pardoned",
}
