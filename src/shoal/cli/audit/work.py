"""The ledger's entries one after the other: each must be possible after those before it, and match the files that it names.

    registered   a key, a name, once                accepted    both files: signatures, digests, the same rollouts, tokens
    policy       one digest a version               batch       accepted groups, whole, young enough, in one batch only
    rejected     a file that fits the reason        trained     the learner's record: exactly the batch's groups and rows
    slashed, dismissed, credited, forfeited         by the rules of `pay`
    staked, ...  as the rules of the accounts allow (`ledger.stakes.Book`)

Invariant: a walk without an error means that every group which was trained on came from a file that its worker signed, a
registered validator accepted and counted, and the learner named. Whoever was rejected for what a file holds signed that file
for exactly that task. No entry is left out: one of an unknown kind is a break.
Called by `audit`. It fills `Found`, from which contributions are summed and steps are run again.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shoal.cli.audit.opened import BrokenError, Opened, naming, read_config
from shoal.cli.audit.pay import Accepted, Found, Pay, Rejected
from shoal.coordinator.trust import max_unchecked
from shoal.learner.groups import Fetched, Gathering
from shoal.learner.report import DOMAIN
from shoal.ledger.stakes import EVENTS, Book, read_event
from shoal.model.turns import model_tokens
from shoal.protocol.identity import Signed
from shoal.protocol.messages import Batch, BatchGroup, Reason, StepRecord
from shoal.store.columns import FileLimits, RolloutFileError
from shoal.store.quarantine import Quarantine
from shoal.store.rollouts import AcceptedRollout, Header, Rollout, RolloutFile, read_accepted
from shoal.tasks.budget import rewards_differ
from shoal.tasks.derive import max_rollouts

LONGEST = 1 << 17  # tokens of a prompt
ELSEWHERE = ("sealed", "witnessed")  # kinds that `chain` checks
# said of files that are not whole, or not for the task
UNFOUNDED = (Reason.UNREADABLE, Reason.SIGNATURE, Reason.CONTEXT)


class Walk:
    def __init__(self, run: Opened) -> None:
        self.run = run
        self.found = Found(run.config)
        self.pay = Pay(self.found)
        self.book = Book()  # the accounts, as far as this ledger says
        self._quarantine: Quarantine | None = None
        self._steps: dict[str, Callable[[dict[str, Any]], None]] = {
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

    def walk(self) -> Found:
        """Raises BrokenError, which names the first entry that is impossible, or the first file that is not its."""
        try:
            for entry, body in zip(self.run.chain, self.run.bodies, strict=True):
                with naming(f"ledger entry {entry.seq}"):
                    if entry.kind not in (*self._steps, *EVENTS, *ELSEWHERE):
                        raise ValueError(f"is of an unknown kind, {entry.kind}")
                    self.pay.begin(entry)
                    if take := self._steps.get(entry.kind):
                        take(body)
                    if event := read_event(entry):
                        self.book.apply(event, entry.time_s)
        finally:
            if self._quarantine is not None:
                self._quarantine.close()
        self.pay.end()
        return self.found

    # --- who and what ------------------------------------------------------------------------------------------------

    def started(self, body: dict[str, Any]) -> None:
        if (body["run"], body["key"]) != (self.run.run, self.run.key):
            raise ValueError(f"starts the run {body['run']} of {body['key'][:16]}, not this one")
        self.found.config = read_config(body["config"], "its config")

    def registered(self, body: dict[str, Any]) -> None:
        key, name = body["key"], body["name"]
        if key in self.found.names or name in self.found.names.values():
            raise ValueError(f"{name} is registered twice")
        self.found.names[key], self.found.roles[key] = name, body["role"]

    def policy(self, body: dict[str, Any]) -> None:
        if body["version"] in self.found.policies:
            raise ValueError(f"version {body['version']} is published twice")
        if body["version"] > len(self.found.batches):
            raise ValueError(f"publishes version {body['version']} before the batch of the step that makes it is full")
        self.found.policies[body["version"]] = body["digest"]

    # --- submissions -------------------------------------------------------------------------------------------------

    def accepted(self, body: dict[str, Any]) -> None:
        id = self._new(body)
        self._is(body["validator"], "validator")
        submission = self._file("submissions", body["file"], id, self._reader().read)
        accepted = self._file("accepted", body["accepted"], id, self._accepted)
        said = body | {"groups": submission.header.groups}  # this entry counts what was accepted
        self._check_header(id, submission.header, said, signer=body["worker"])
        self._check_header(id, accepted.header, said, signer=body["validator"])
        if accepted.header.prefilled < body["full"]:
            raise ValueError(f"{id} was prefilled whole, says the ledger; its file says otherwise")
        if [_same(row) for row in submission.rows] != [_same(row) for row in accepted.rows]:
            raise BrokenError(f"accepted file of {id}", "holds other rollouts than its worker's file")
        size = self.found.config.sampling.group_size
        groups = [accepted.rows[start : start + size] for start in range(0, len(accepted.rows), size)]
        counted = [sum(model_tokens(row.turns, len(row.tokens)) for row in rows) for rows in groups]
        if (sum(counted), len(groups)) != (body["tokens"], body["groups"]):
            raise ValueError(f"credits {body['tokens']} tokens of {id}, whose accepted file holds {sum(counted)}")
        as_said = ("worker", "validator", "step", "version", "nonce", "full", "file", "accepted")
        one = self.found.accepted[id] = Accepted(
            **{name: body[name] for name in as_said},
            id=id,
            number=submission.header.submission,
            tokens=sum(counted),
            useful=[rewards_differ([row.reward for row in rows]) for rows in groups],
            group_tokens=counted,
            content=submission.header.content,
        )
        self.pay.accepted(one)

    def rejected(self, body: dict[str, Any]) -> None:
        """What its file must hold follows from the reason: see `_misfit`."""
        id, one = self._new(body), Rejected(body, self.found.config)
        self._is(body["validator"], "validator")
        with naming(f"submission file of {id}"):
            data = self.run.store.get("submissions", body["file"])
        if (why := self._misfit(id, data, body)) and one.reason not in UNFOUNDED:
            raise ValueError(f"rejects {id} as {one.reason}, which is said of no such file: {why}")
        if not why and one.reason in UNFOUNDED:
            self.found.unproven[f"rejections as {one.reason} of files that are whole and signed for their task"] += 1
        if one.reason is Reason.REPLAYED and not why:
            self._check_replayed(id, one)
        self.found.rejected[id] = one
        self.pay.rejected(id, one)

    def _misfit(self, id: str, data: bytes, body: dict[str, Any]) -> str:
        """Why this file is not one that its worker signed for this task; "" if it is.

        Every reason but the `UNFOUNDED` is given to files that passed this check of a validator.
        """
        try:
            header = self._reader().read(data).header
            self._check_header(id, header, body, signer=body["worker"])
        except (RolloutFileError, ValueError) as error:
            return str(error)
        return ""

    def _check_replayed(self, id: str, one: Rejected) -> None:
        content = self._reader().read(self.run.store.get("submissions", one.body["file"])).header.content
        held = {before.content for before in self.found.accepted.values() if before.worker == one.worker}
        if content not in held:
            raise ValueError(f"rejects {id} as replayed, and nothing accepted of its worker holds the same rollouts")

    # --- steps -------------------------------------------------------------------------------------------------------

    def batch(self, body: dict[str, Any]) -> None:
        step, config = body["step"], self.found.config
        members = [(str(id), int(group)) for id, group in body["groups"]]
        due = len(self.found.batches)
        if step != due or due >= config.run.steps or len(members) != config.coordinator.prompts_per_step:
            raise ValueError(f"is not the batch of step {due + 1} of {config.run.steps}")
        unchecked = 0
        for id, group in members:
            one = self.found.accepted.get(id)
            if one is None or group >= len(one.useful) or (id, group) in self.found.batched:
                raise ValueError(f"group {group} of {id} is in two batches, or was not accepted")
            if not one.version <= step <= one.version + config.coordinator.async_level:
                raise ValueError(f"group {group} of {id} is of version {one.version}, too old for step {step + 1}")
            if config.coordinator.online_filter and not one.useful[group]:
                raise ValueError(f"group {group} of {id} has equal rewards, and teaches nothing")
            unchecked += not one.full
            self.found.batched.add((id, group))
        if unchecked > max_unchecked(config):
            raise ValueError(f"has {unchecked} groups that were not prefilled whole")
        self.found.batches.append(members)

    def trained(self, body: dict[str, Any]) -> None:
        step = len(self.found.records)
        signed = Signed.model_validate_json(body["record"])
        self._is(signed.key, "learner")
        record = StepRecord.model_validate_json(signed.open(signed.key, domain=DOMAIN))
        if not record.run == self.run.run or not step == record.step == body["step"]:
            raise ValueError(f"records step {record.step + 1} of {record.run}, not step {step + 1}")
        if step >= len(self.found.batches):
            raise ValueError(f"trains step {step + 1} before its batch is full")
        self.found.configs.append(self.found.config)
        fetched = gather_step(self.run, self.found, step)
        groups = [BatchGroup(submission=group.submission, group=group.number) for group in fetched.groups]
        if self.found.config.learner.sites:  # what a site that died was to train is in no version
            groups = [group for group in groups if group in record.groups]
        if groups != record.groups:
            raise ValueError(f"the learner trained step {step + 1} on other groups than its batch's")
        for id, content in record.files.items():
            if fetched.contents.get(id) != content:
                raise ValueError(f"the learner trained step {step + 1} on other rows of {id} than those accepted")
        if set(record.files) != {group.submission for group in groups} or sorted(record.files) != body["submissions"]:
            raise ValueError(f"names other submissions than the learner for step {step + 1}")
        if self.found.records and self.found.records[-1].after != record.before:
            raise ValueError(f"step {step + 1} began with other weights than step {step} ended with")
        self.found.records.append(record)

    # --- what they share ---------------------------------------------------------------------------------------------

    def _new(self, body: dict[str, Any]) -> str:
        id, worker = str(body["submission"]), body["worker"]
        self._is(worker, "worker")
        if id in self.found.accepted or id in self.found.rejected:
            raise ValueError(f"judges {id} twice")
        if not id.startswith(worker[:16]) or body["version"] not in self.found.policies:
            raise ValueError(f"{id} is not {worker[:16]}'s, or of a version that was not published")
        if not body["version"] <= body["step"] <= min(len(self.found.batches), self.found.config.run.steps - 1):
            raise ValueError(f"{id} is for step {body['step'] + 1}, which was not open, with version {body['version']}")
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
            "groups": body["groups"],
            "signer": signer,
        }
        for name, value in said.items():
            if getattr(header, name) != value:
                raise ValueError(f"a file of {id} says {name} {getattr(header, name)!s:.40}, the ledger {value!s:.40}")

    def _file(self, kind: str, hash: str, id: str, read: Callable[[bytes], Any]) -> Any:
        with naming(f"{'submission' if kind == 'submissions' else kind} file of {id}"):
            return read(self.run.store.get(kind, hash))

    def _limits(self) -> FileLimits:
        return FileLimits(max_rollouts(self.found.config), max(self.found.config.sampling.max_tokens, LONGEST))

    def _reader(self) -> Quarantine:
        """What reads the files of workers, in a child process."""
        limits = self._limits()
        if self._quarantine is None or self._quarantine.limits != limits:
            if self._quarantine is not None:
                self._quarantine.close()
            self._quarantine = Quarantine(limits.max_rows, limits.max_tokens)
        return self._quarantine

    def _accepted(self, data: bytes) -> RolloutFile[AcceptedRollout]:
        limits = self._limits()
        return read_accepted(data, max_rows=limits.max_rows, max_tokens=limits.max_tokens)


def gather_step(run: Opened, found: Found, step: int) -> Fetched:
    """A step's groups from the accepted files, exactly as the learner gathers them. Raises StoreError."""
    members = [BatchGroup(submission=id, group=group) for id, group in found.batches[step]]
    batch = Batch(step=step, ready=True, have=len(members), need=len(members), groups=members)

    def read(id: str) -> bytes:
        return run.store.get("accepted", found.accepted[id].accepted)

    with TemporaryDirectory() as scratch:
        validators = run.keys.get("validator", set())
        gathering = Gathering(read, run=run.run, config=found.configs[step], quarantine=Path(scratch))
        return gathering.gather(batch, validators)


def _same(row: Rollout | AcceptedRollout) -> tuple[object, ...]:
    """What a validator takes over from a worker's row."""
    return row.group, row.task, row.tokens, row.turns
