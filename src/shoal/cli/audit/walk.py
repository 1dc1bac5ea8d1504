"""Walk along the ledger: each entry must be possible after the earlier ones, and match the files that it names.

    registered      the key and the name are new
    policy          the version was not published before, and the batch that it was trained on is full
    accepted        the worker's and the validator's files: signatures, digests, equal rollouts, the number of tokens
    rejected        the file fits the reason
    (both)          validators signed the opinions, and the verdict follows from these
    batch           the groups were accepted, have an allowed age, and are in no other batch
    trained         the learner's record names exactly the batch's groups and rows
    slashed, dismissed, credited, forfeited     the rules in `pay`
    staked, ...     the rules of the accounts (`ledger.stakes.Book`)

Invariants, if no error is raised: each trained group comes from a file that its worker signed. A registered validator
accepted that file and signed a copy, and the learner's record names it. If a file was rejected for its content, its
worker had signed it for exactly that task. An entry of an unknown kind is an error. The result is an `AuditState`.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shoal.cli.audit.pay import Accepted, AuditState, Pay, Rejected
from shoal.cli.audit.run import AuditedRun, BrokenError, checking, read_config
from shoal.config import Config, check_resumed
from shoal.coordinator.checkers import MAX_OPINIONS, standing
from shoal.coordinator.trust import max_unchecked
from shoal.learner.groups import Fetched, Gathering
from shoal.learner.report import DOMAIN
from shoal.ledger.chain import open_opinion
from shoal.ledger.stakes import EVENTS, Book, read_event
from shoal.model.turns import model_tokens
from shoal.protocol.identity import Signed
from shoal.protocol.messages import Batch, BatchGroup, Opinion, Reason, StepRecord
from shoal.store.columns import FileLimits, RolloutFileError
from shoal.store.quarantine import Quarantine
from shoal.store.rollouts import AcceptedRollout, Header, Rollout, RolloutFile, read_accepted
from shoal.tasks.budget import rewards_differ
from shoal.tasks.derive import max_rollouts

MAX_TOKENS = 1 << 17  # limit for a prompt, which may be longer than sampling.max_tokens
ELSEWHERE = ("sealed", "witnessed")  # kinds of entry that the module `run` checks
BAD_FILE = (Reason.UNREADABLE, Reason.SIGNATURE, Reason.CONTEXT)  # the file is damaged, or not for the task


class Walk:
    def __init__(self, run: AuditedRun) -> None:
        self.run = run
        self.state = AuditState(run.config, checks=run.checks)
        self.pay = Pay(self.state)
        self.book = Book()  # the accounts in this ledger
        self._quarantine: Quarantine | None = None
        self._checks: dict[str, Callable[[dict[str, Any]], None]] = {
            "started": self.started,
            "registered": self.registered,
            "policy": self.policy,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "slashed": self.pay.slashed,
            "dismissed": self.pay.dismissed,
            "credited": self.pay.credited,
            "forfeited": self.pay.forfeited,
            "batch": self.batch,
            "trained": self.trained,
        }

    def walk(self) -> AuditState:
        """Check all entries. Raise BrokenError for the first one that is impossible or does not match its files."""
        try:
            for entry, body in zip(self.run.chain, self.run.bodies, strict=True):
                with checking(f"ledger entry {entry.seq}"):
                    if entry.kind not in (*self._checks, *EVENTS, *ELSEWHERE):
                        raise ValueError(f"has an unknown kind, {entry.kind}")
                    self.pay.begin(entry)
                    if check := self._checks.get(entry.kind):
                        check(body)
                    if event := read_event(entry):
                        self.book.apply(event, entry.time_s)
                    # with each entry, the files or the record that it names are checked
                    self.state.checks.passed += {"accepted": 3, "rejected": 2, "trained": 2}.get(entry.kind, 1)
        finally:
            if self._quarantine is not None:
                self._quarantine.close()
        self.pay.end()
        return self.state

    # --- members and versions ----------------------------------------------------------------------------------------

    def started(self, body: dict[str, Any]) -> None:
        if (body["run"], body["key"]) != (self.run.run, self.run.key):
            raise ValueError(f"starts the run {body['run']} of {body['key'][:16]}, not this run")
        config = read_config(body["config"], "its config")
        if self.state.text:
            self.state.changes += check_resumed(self.state.text, config)
        self.state.config, self.state.text = config, body["config"]

    def registered(self, body: dict[str, Any]) -> None:
        key, name = body["key"], body["name"]
        if key in self.state.names or name in self.state.names.values():
            raise ValueError(f"{name} is registered twice")
        self.state.names[key], self.state.roles[key] = name, body["role"]

    def policy(self, body: dict[str, Any]) -> None:
        if body["version"] in self.state.policies:
            raise ValueError(f"version {body['version']} is published twice")
        if body["version"] > len(self.state.batches):
            raise ValueError(f"publishes version {body['version']} before the batch that it was trained on is full")
        self.state.policies[body["version"]] = body["digest"]

    # --- submissions -------------------------------------------------------------------------------------------------

    def accepted(self, body: dict[str, Any]) -> None:
        id = self._new_id(body)
        self._require_role(body["validator"], "validator")
        with checking(f"submission file of {id}"):
            submission = self._reader().read(self.run.store.get("submissions", body["file"]))
        with checking(f"accepted file of {id}"):
            accepted = read_accepted_file(self.run, self.state.config, body["accepted"])
        expected = body | {"groups": submission.header.groups}  # the entry's `groups` counts only accepted groups
        self._check_header(id, submission.header, expected, signer=body["worker"])
        self._check_header(id, accepted.header, expected, signer=body["validator"])
        if accepted.header.prefilled < body["full"]:
            raise ValueError(f"the ledger says that {id} was prefilled whole, but its file does not")
        if [_copied(row) for row in submission.rows] != [_copied(row) for row in accepted.rows]:
            raise BrokenError(f"accepted file of {id}", "has rollouts that differ from those in its worker's file")
        size = self.state.config.sampling.group_size
        groups = [accepted.rows[start : start + size] for start in range(0, len(accepted.rows), size)]
        counted = [sum(model_tokens(row.turns, len(row.tokens)) for row in rows) for rows in groups]
        if (sum(counted), len(groups)) != (body["tokens"], body["groups"]):
            raise ValueError(f"credits {body['tokens']} tokens of {id}, whose accepted file has {sum(counted)}")
        opinion, _ = self._opinions(id, body)
        if (opinion.reason, opinion.accepted, opinion.tokens) != (None, body["accepted"], body["tokens"]):
            raise ValueError(f"accepts {id}, but the opinion that stands does not accept this file with these tokens")
        names = ("worker", "validator", "step", "version", "nonce", "full", "file", "accepted")
        self.state.accepted[id] = Accepted(
            **{name: body[name] for name in names},
            id=id,
            number=submission.header.submission,
            tokens=sum(counted),
            useful=[rewards_differ([row.reward for row in rows]) for rows in groups],
            group_tokens=counted,
            config=self.state.config,
        )
        self.pay.accepted(self.state.accepted[id], opinion)

    def rejected(self, body: dict[str, Any]) -> None:
        """Check a rejection. Except for `BAD_FILE` reasons, the worker must have signed the file for this task."""
        id = self._new_id(body)
        self._require_role(body["validator"], "validator")
        opinion, sharing = self._opinions(id, body)
        rejection = Rejected(body, self.state.config, sharing > 1)
        reason = rejection.reason
        if opinion.reason is not (None if reason is Reason.SPENDING else reason):
            raise ValueError(
                f"rejects {id} as {reason}, but the opinion that stands says {opinion.reason or 'accepted'}"
            )
        with checking(f"submission file of {id}"):
            data = self.run.store.get("submissions", body["file"])
        fault = ""
        try:
            self._check_header(id, self._reader().read(data).header, body, signer=body["worker"])
        except (RolloutFileError, ValueError) as error:
            fault = str(error)
        if fault and reason not in BAD_FILE:
            raise ValueError(f"rejects {id} as {reason}, but the worker did not sign this file for the task: {fault}")
        if not fault and reason in BAD_FILE:
            self.state.checks.unproven[f"rejections as {reason} of files that are whole and signed for their task"] += 1
        self.state.rejected[id] = rejection
        self.pay.rejected(id, rejection, opinion)

    def _opinions(self, id: str, body: dict[str, Any]) -> tuple[Opinion, int]:
        """Return the opinion that stands, of the entry's validator, and how many validators share it."""
        opinions: dict[str, Opinion] = {}
        for text in body["opinions"]:
            validator = Signed.model_validate_json(text).key
            self._require_role(validator, "validator")
            opinion = open_opinion(text, validator)
            if validator in opinions or (opinion.run, opinion.submission, opinion.file) != (
                self.run.run,
                id,
                body["file"],
            ):
                raise ValueError(f"holds two opinions of one validator on {id}, or one on something else")
            opinions[validator] = opinion
        if not 1 <= len(opinions) <= MAX_OPINIONS:
            raise ValueError(f"holds {len(opinions)} opinions on {id}")
        opinion, sharing = standing(list(opinions.values()))
        if opinions.get(body["validator"]) is not opinion:
            raise ValueError(f"names a validator whose opinion on {id} does not stand")
        return opinion, sharing

    # --- steps -------------------------------------------------------------------------------------------------------

    def batch(self, body: dict[str, Any]) -> None:
        step, config = body["step"], self.state.config
        members = [(str(id), int(group)) for id, group in body["groups"]]
        due = len(self.state.batches)
        if due >= config.run.steps:
            raise ValueError(f"is a batch for step {due + 1}, but the run has {config.run.steps} steps")
        if step != due or len(members) != config.coordinator.prompts_per_step:
            raise ValueError(f"is not a full batch for step {due + 1}")
        unchecked = 0
        for id, group in members:
            source = self.state.accepted.get(id)
            if source is None or not 0 <= group < len(source.useful) or (id, group) in self.state.batched:
                raise ValueError(f"group {group} of {id} is in two batches, or was not accepted")
            if not source.version <= step <= source.version + config.coordinator.async_level:
                age = f"version {source.version}, which is too old or too new for step {step + 1}"
                raise ValueError(f"group {group} of {id} has {age}")
            if config.coordinator.online_filter and not source.useful[group]:
                raise ValueError(f"group {group} of {id} has equal rewards, which the online filter drops")
            unchecked += not source.full
            self.state.batched.add((id, group))
        if unchecked > max_unchecked(config):
            raise ValueError(f"has {unchecked} groups that were not prefilled whole")
        self.state.batches.append(members)

    def trained(self, body: dict[str, Any]) -> None:
        step = len(self.state.records)
        signed = Signed.model_validate_json(body["record"])
        self._require_role(signed.key, "learner")
        record = StepRecord.model_validate_json(signed.open(signed.key, domain=DOMAIN))
        if not record.run == self.run.run or not step == record.step == body["step"]:
            raise ValueError(f"records step {record.step + 1} of {record.run}, not step {step + 1}")
        if step >= len(self.state.batches):
            raise ValueError(f"trains step {step + 1} before its batch is full")
        self.state.configs.append(self.state.config)
        fetched = gather_step(self.run, self.state, step)
        groups = [BatchGroup(submission=group.submission, group=group.number) for group in fetched.groups]
        if self.state.config.learner.sites:  # the groups of a site that died are not trained
            groups = [group for group in groups if group in record.groups]
        if groups != record.groups:
            raise ValueError(f"the learner trained step {step + 1} on groups that differ from its batch's")
        for id, content in record.files.items():
            if fetched.contents.get(id) != content:
                raise ValueError(
                    f"the learner trained step {step + 1} on rows of {id} that differ from the accepted ones"
                )
        if set(record.files) != {group.submission for group in groups} or sorted(record.files) != body["submissions"]:
            raise ValueError(f"names submissions for step {step + 1} that differ from those in the learner's record")
        if self.state.records and self.state.records[-1].after != record.before:
            raise ValueError(f"step {step + 1} began with weights that differ from those at the end of step {step}")
        self.state.records.append(record)

    # --- shared ------------------------------------------------------------------------------------------------------

    def _new_id(self, body: dict[str, Any]) -> str:
        """Return the submission's id. Raise ValueError if it was judged before or cannot be this worker's."""
        id, worker = str(body["submission"]), body["worker"]
        self._require_role(worker, "worker")
        if id in self.state.accepted or id in self.state.rejected:
            raise ValueError(f"judges {id} twice")
        if not id.startswith(worker[:16]) or body["version"] not in self.state.policies:
            raise ValueError(f"{id} is not a submission of {worker[:16]}, or its version was not published")
        if not body["version"] <= body["step"] <= min(len(self.state.batches), self.state.config.run.steps - 1):
            raise ValueError(f"{id} (version {body['version']}) is for step {body['step'] + 1}, which was not open")
        return id

    def _require_role(self, key: str, role: str) -> None:
        if self.state.roles.get(key) != role:
            raise ValueError(f"{str(key)[:16]} was not registered as {role} before")

    def _check_header(self, id: str, header: Header, body: dict[str, Any], *, signer: str) -> None:
        expected = {
            "run": self.run.run,
            "step": body["step"],
            "policy_version": body["version"],
            "policy_digest": self.state.policies[body["version"]],
            "worker": body["worker"],
            "submission": int(id.rpartition("-")[2]),
            "nonce": body["nonce"],
            "groups": body["groups"],
            "signer": signer,
        }
        for name, value in expected.items():
            if getattr(header, name) != value:
                raise ValueError(
                    f"a file of {id} says {name} {getattr(header, name)!s:.40}, but the ledger says {value!s:.40}"
                )

    def _reader(self) -> Quarantine:
        """Return the reader of workers' files, which is a child process."""
        limits = _limits(self.state.config)
        if self._quarantine is None or self._quarantine.limits != limits:
            if self._quarantine is not None:
                self._quarantine.close()
            self._quarantine = Quarantine(limits.max_rows, limits.max_tokens)
        return self._quarantine


def read_accepted_file(run: AuditedRun, config: Config, hash: str) -> RolloutFile[AcceptedRollout]:
    """Return a validator's file from the store. `config`: in force when it was accepted. Raise ShoalError."""
    limits = _limits(config)
    return read_accepted(run.store.get("accepted", hash), max_rows=limits.max_rows, max_tokens=limits.max_tokens)


def gather_step(run: AuditedRun, state: AuditState, step: int) -> Fetched:
    """Return a step's groups from the accepted files, gathered by the learner's code. Raise StoreError."""
    members = [BatchGroup(submission=id, group=group) for id, group in state.batches[step]]
    batch = Batch(step=step, ready=True, groups=members)

    def read(id: str) -> bytes:
        return run.store.get("accepted", state.accepted[id].accepted)

    with TemporaryDirectory() as scratch:
        validators = run.keys.get("validator", set())
        gathering = Gathering(read, run=run.run, config=state.configs[step], quarantine=Path(scratch))
        return gathering.gather(batch, validators)


def _limits(config: Config) -> FileLimits:
    return FileLimits(max_rollouts(config), max(config.sampling.max_tokens, MAX_TOKENS))


def _copied(row: Rollout | AcceptedRollout) -> tuple[object, ...]:
    """Return the fields that a validator copies from a worker's row."""
    return row.group, row.tokens, row.turns
