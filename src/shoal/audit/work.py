"""The ledger's entries one after the other: each must be possible after those before it, and match the files that it names.

    registered   a key, a name, once                accepted    both files: signatures, digests, the same rollouts, tokens
    policy       one digest a version               batch       accepted groups, whole, young enough, in one batch only
    rejected     the file; slashed after it         trained     the learner's record: exactly the batch's groups and rows
    credited     what was accepted, once, covered by later checks or the run's end; or forfeited
    staked, ...  as the rules of the accounts allow (`ledger.stakes.Book`)

Invariant: a walk without an error means that every group which was trained on came from a file that its worker signed, a
registered validator accepted and counted, and the learner named.
Called by `audit`. It fills `Found`, from which contributions are summed and steps are run again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shoal.audit.opened import BrokenError, Opened, first_of, naming, read_config
from shoal.config import Config
from shoal.coordinator.jobs.curriculum import recomputed
from shoal.coordinator.trust.checking import most_unchecked
from shoal.learner.groups import Fetched, gather
from shoal.learner.record import DOMAIN
from shoal.ledger.stakes import Book, read_event
from shoal.model.turns import model_tokens
from shoal.protocol.identity import Signed
from shoal.protocol.messages import HARD, Batch, BatchGroup, StepRecord
from shoal.store.rollouts import (
    AcceptedRollout,
    Header,
    Rollout,
    RolloutFile,
    read_accepted,
    read_submission,
)
from shoal.tasks.budget import rewards_differ
from shoal.tasks.derive import max_rollouts

LONGEST = 1 << 17  # tokens of a prompt


@dataclass(frozen=True)
class Accepted:
    """An accepted submission, as the ledger and its two files agree on it."""

    id: str
    number: int  # among the tasks of its worker
    worker: str
    validator: str
    step: int
    version: int
    nonce: str
    full: bool
    tokens: int  # sampled, counted here
    useful: list[bool]  # of each group: its rewards differ
    group_tokens: list[int]
    file: str  # hashes in the store
    accepted: str


@dataclass
class Found:
    """What the walk has seen so far."""

    names: dict[str, str] = field(default_factory=dict)  # by key
    roles: dict[str, str] = field(default_factory=dict)
    policies: dict[int, str] = field(default_factory=dict)
    accepted: dict[str, Accepted] = field(default_factory=dict)
    rejected: dict[str, tuple[str, str]] = field(default_factory=dict)  # worker and reason, by submission
    slashed: dict[str, str] = field(default_factory=dict)  # worker -> submission
    credit: dict[str, str] = field(default_factory=dict)  # credited or forfeited, by submission
    batches: list[list[tuple[str, int]]] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    configs: list[Config] = field(default_factory=list)  # of each record: a resumed run may have another one
    batched: set[tuple[str, int]] = field(default_factory=set)


class Walk:
    def __init__(self, run: Opened) -> None:
        self.run = run
        self.found = Found()
        self.book = Book()  # the accounts, as far as this ledger says
        self.config = run.config  # in force at the entry that is being read
        self._steps: dict[str, Callable[[dict[str, Any]], None]] = {
            "started": self.started,
            "registered": self.registered,
            "policy": self.policy,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "slashed": self.slashed,
            "dismissed": self.dismissed,
            "credited": self.credited,
            "forfeited": self.forfeited,
            "batch": self.batch,
            "trained": self.trained,
        }

    def walk(self) -> Found:
        """Raises BrokenError, which names the first entry that is impossible, or the first file that is not its."""
        for entry, body in zip(self.run.chain, self.run.bodies, strict=True):
            with naming(f"ledger entry {entry.seq}"):
                if take := self._steps.get(entry.kind):
                    take(body)
                if event := read_event(entry):
                    self.book.take(event, entry.time_s)
        self.pages()
        return self.found

    # --- who and what ------------------------------------------------------------------------------------------------

    def started(self, body: dict[str, Any]) -> None:
        if (body["run"], body["key"]) != (self.run.run, self.run.key):
            raise ValueError(f"starts the run {body['run']} of {body['key'][:16]}, not this one")
        self.config = read_config(body["config"], "its config")

    def registered(self, body: dict[str, Any]) -> None:
        key, name = body["key"], body["name"]
        if key in self.found.names or name in self.found.names.values():
            raise ValueError(f"{name} is registered twice")
        self.found.names[key], self.found.roles[key] = name, body["role"]

    def policy(self, body: dict[str, Any]) -> None:
        if body["version"] in self.found.policies:
            raise ValueError(f"version {body['version']} is published twice")
        self.found.policies[body["version"]] = body["digest"]

    # --- submissions -------------------------------------------------------------------------------------------------

    def accepted(self, body: dict[str, Any]) -> None:
        id = self._new(body)
        self._is(body["validator"], "validator")
        submission = self._file("submissions", body["file"], id, self._submission)
        accepted = self._file("accepted", body["accepted"], id, self._accepted)
        self._check_header(id, submission.header, body, signer=body["worker"])
        self._check_header(id, accepted.header, body, signer=body["validator"])
        if accepted.header.prefilled < body["full"]:
            raise ValueError(f"{id} was prefilled whole, says the ledger; its file says otherwise")
        if [_same(row) for row in submission.rows] != [_same(row) for row in accepted.rows]:
            raise BrokenError(f"accepted file of {id}", "holds other rollouts than its worker's file")
        size = self.config.sampling.group_size
        groups = [accepted.rows[start : start + size] for start in range(0, len(accepted.rows), size)]
        counted = [sum(model_tokens(row.turns, len(row.tokens)) for row in rows) for rows in groups]
        if (sum(counted), len(groups)) != (body["tokens"], body["groups"]):
            raise ValueError(f"credits {body['tokens']} tokens of {id}, whose accepted file holds {sum(counted)}")
        self.found.accepted[id] = Accepted(
            **{
                name: body[name]
                for name in ("worker", "validator", "step", "version", "nonce", "full", "file", "accepted")
            },
            id=id,
            number=submission.header.submission,
            tokens=sum(counted),
            useful=[rewards_differ([row.reward for row in rows]) for rows in groups],
            group_tokens=counted,
        )

    def rejected(self, body: dict[str, Any]) -> None:
        id = self._new(body)
        self._is(body["validator"], "validator")
        with naming(f"submission file of {id}"):
            self.run.store.get("submissions", body["file"])
        self.found.rejected[id] = body["worker"], body["reason"]

    def slashed(self, body: dict[str, Any]) -> None:
        known = self.found.rejected.get(body["submission"])
        if known != (body["worker"], body["reason"]) or known[1] not in HARD:
            raise ValueError(f"slashes {body['worker'][:16]} without a hard rejection of {body['submission']}")
        if body["worker"] in self.found.slashed:
            raise ValueError(f"slashes {body['worker'][:16]} twice")
        self.found.slashed[body["worker"]] = body["submission"]

    def dismissed(self, body: dict[str, Any]) -> None:
        if self.found.rejected.get(body["submission"]) != (body["worker"], "spending"):
            raise ValueError(
                f"dismisses {body['worker'][:16]} without a rejection of {body['submission']} for spending"
            )

    # --- credit ------------------------------------------------------------------------------------------------------

    def credited(self, body: dict[str, Any]) -> None:
        self._settle(body, "credited")
        if len(self.found.records) == self.config.run.steps:
            return  # at the run's end all that waits is paid
        theirs = {one.number: one for one in self.found.accepted.values() if one.worker == body["worker"]}
        checked = sorted(number for number, one in theirs.items() if one.full)
        needed = self.config.validator.escrow_checks
        covered = {one.id for number, one in theirs.items() if len(checked) >= needed and number < checked[-needed]}
        if not set(body["submissions"]) <= covered:
            raise ValueError(f"pays {first_of(body['submissions'])} before later checks cover it")

    def forfeited(self, body: dict[str, Any]) -> None:
        self._settle(body, "forfeited")

    def _settle(self, body: dict[str, Any], how: str) -> None:
        tokens = 0
        for id in body["submissions"]:
            one = self.found.accepted.get(id)
            if one is None or one.worker != body["worker"] or id in self.found.credit:
                raise ValueError(f"{id} is not accepted work of {body['worker'][:16]} whose credit waits")
            self.found.credit[id] = how
            tokens += one.tokens
        if tokens != body["tokens"]:
            raise ValueError(f"{how} {body['tokens']} tokens; the validators counted {tokens}")

    # --- steps -------------------------------------------------------------------------------------------------------

    def batch(self, body: dict[str, Any]) -> None:
        step, config = body["step"], self.config
        members = [(str(id), int(group)) for id, group in body["groups"]]
        if step != len(self.found.batches) or len(members) != config.coordinator.prompts_per_step:
            raise ValueError(f"is not the batch of step {len(self.found.batches)}")
        unchecked = 0
        for id, group in members:
            one = self.found.accepted.get(id)
            if one is None or group >= len(one.useful) or (id, group) in self.found.batched:
                raise ValueError(f"group {group} of {id} is in two batches, or was not accepted")
            if not one.version <= step <= one.version + config.coordinator.async_level:
                raise ValueError(f"group {group} of {id} is of version {one.version}, too old for step {step}")
            if config.coordinator.online_filter and not one.useful[group]:
                raise ValueError(f"group {group} of {id} has equal rewards, and teaches nothing")
            unchecked += not one.full
            self.found.batched.add((id, group))
        if unchecked > most_unchecked(config):
            raise ValueError(f"has {unchecked} groups that were not prefilled whole")
        self.found.batches.append(members)

    def trained(self, body: dict[str, Any]) -> None:
        step = len(self.found.records)
        signed = Signed.model_validate_json(body["record"])
        self._is(signed.key, "learner")
        record = StepRecord.model_validate_json(signed.open(signed.key, domain=DOMAIN))
        if not record.run == self.run.run or not step == record.step == body["step"]:
            raise ValueError(f"records step {record.step} of {record.run}, not step {step}")
        if step >= len(self.found.batches):
            raise ValueError(f"trains step {step} before its batch is full")
        self.found.configs.append(self.config)
        fetched = gather_step(self.run, self.found, step)
        groups = [BatchGroup(submission=group.submission, group=group.number) for group in fetched.groups]
        if self.config.learner.sites:  # what a site that died was to train is in no version
            groups = [group for group in groups if group in record.groups]
        if groups != record.groups:
            raise ValueError(f"the learner trained step {step} on other groups than its batch's")
        for id, content in record.files.items():
            if fetched.contents.get(id) != content:
                raise ValueError(f"the learner trained step {step} on other rows of {id} than those accepted")
        if set(record.files) != {group.submission for group in groups} or sorted(record.files) != body["submissions"]:
            raise ValueError(f"names other submissions than the learner for step {step}")
        if self.found.records and self.found.records[-1].after != record.before:
            raise ValueError(f"step {step} began with other weights than step {step - 1} ended with")
        self.found.records.append(record)

    def pages(self) -> None:
        """The curriculum's pages follow from the accepted scores."""
        entries = [entry for entry in self.run.chain if entry.kind == "curriculum"]
        for entry, (page, recorded) in zip(entries, recomputed(self.run.chain), strict=True):
            if page.digest() != recorded:
                raise BrokenError(f"ledger entry {entry.seq}", f"the page of step {page.step} is not what was accepted")

    # --- what they share ---------------------------------------------------------------------------------------------

    def _new(self, body: dict[str, Any]) -> str:
        id, worker = str(body["submission"]), body["worker"]
        self._is(worker, "worker")
        if id in self.found.accepted or id in self.found.rejected:
            raise ValueError(f"judges {id} twice")
        if not id.startswith(worker[:16]) or body["version"] not in self.found.policies:
            raise ValueError(f"{id} is not {worker[:16]}'s, or of a version that was not published")
        return id

    def _is(self, key: str, role: str) -> None:
        if self.found.roles.get(key) != role:
            raise ValueError(f"{str(key)[:16]} was not registered as {role} before")

    def _check_header(self, id: str, header: Header, body: dict[str, Any], *, signer: str) -> None:
        said = {
            "run": self.run.run,
            "step": body["step"],
            "policy_version": body["version"],
            "policy_digest": self.found.policies[body["version"]],
            "worker": body["worker"],
            "submission": int(id.rpartition("-")[2]),
            "nonce": body["nonce"],
            "signer": signer,
        }
        for name, value in said.items():
            if getattr(header, name) != value:
                raise ValueError(f"a file of {id} says {name} {getattr(header, name)!s:.40}, the ledger {value!s:.40}")

    def _file(self, kind: str, hash: str, id: str, read: Callable[[bytes], Any]) -> Any:
        with naming(f"{'submission' if kind == 'submissions' else kind} file of {id}"):
            return read(self.run.store.get(kind, hash))

    def _longest(self) -> int:
        return max(self.config.sampling.max_tokens, LONGEST)

    def _submission(self, data: bytes) -> RolloutFile[Rollout]:
        return read_submission(data, max_rows=max_rollouts(self.config), max_tokens=self._longest())

    def _accepted(self, data: bytes) -> RolloutFile[AcceptedRollout]:
        return read_accepted(data, max_rows=max_rollouts(self.config), max_tokens=self._longest())


def gather_step(run: Opened, found: Found, step: int) -> Fetched:
    """A step's groups from the accepted files, exactly as the learner gathers them. Raises StoreError."""
    members = [BatchGroup(submission=id, group=group) for id, group in found.batches[step]]
    batch = Batch(step=step, ready=True, have=len(members), need=len(members), groups=members)

    def read(id: str) -> bytes:
        return run.store.get("accepted", found.accepted[id].accepted)

    with TemporaryDirectory() as scratch:
        validators = run.keys.get("validator", set())
        return gather(
            batch, read, validators=validators, run=run.run, config=found.configs[step], quarantine=Path(scratch)
        )


def _same(row: Rollout | AcceptedRollout) -> tuple[object, ...]:
    """What a validator takes over from a worker's row."""
    return row.group, row.task, row.tokens, row.turns
