"""Fetches and verifies the groups of one step, and shares them among the ranks. The learner trusts no other process.

The leader (rank 0) has each group's tokens and logprobs, as arrays from the file. The other ranks have its outline
(lengths and rewards), which is enough to plan the rows. Tokens go only to the rank that computes them (`updates`).
While one step trains, the leader prefetches the next step's files as soon as the next step's batch is full.
Invariant: every group is signed by a registered validator, is within the async level, and has plausible values. Each file
is that of its submission, and no two submissions of a batch have the same rows, so no group trains twice. All ranks have
the same groups in the same order. A file that breaks the schema is moved to quarantine. A group is left out and counted
if it is in such a file, belongs to another run or submission, is too old, or has implausible values.
Nothing in a full batch may stop the learner. A full batch never changes, so a batch that stops the learner would also
stop it after every restart.
"""

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shoal.config import Config
from shoal.errors import ShoalError
from shoal.evidence import within
from shoal.files import write_file
from shoal.learner.ranks import Ranks
from shoal.model.sampling import LOWEST_LOGPROB
from shoal.model.turns import model_tokens
from shoal.protocol.calling import RefusedError
from shoal.protocol.messages import Batch, BatchGroup
from shoal.protocol.node import Node
from shoal.store.columns import Columns, RolloutFileError
from shoal.store.rollouts import Header, accepted_columns
from shoal.tasks.derive import max_rollouts

HIGHEST_LOGPROB = 1e-3  # nats; above 0, to allow for rounding
LARGEST_REWARD = 1e6
LONGEST_PROMPT = 1 << 17  # tokens; limits the memory that reading an accepted file may take

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Outline:
    """A group without its tokens and logprobs. Every rank has it."""

    submission: str
    number: int  # index in the submission
    policy_version: int
    prompt_tokens: int
    lengths: list[int]  # tokens of each completion
    rewards: list[float]
    turns: list[list[int]] = field(default_factory=list)  # turns of each completion (`model/turns`); [] if each has one
    checked: bool = True  # if false, the behaviour logprobs are the worker's own and are not used

    @cached_property
    def trained(self) -> list[int]:
        """The number of trained tokens in each completion: only tokens that the model wrote are trained."""
        turns = self.turns or [[]] * len(self.lengths)
        return [model_tokens(own, length) for own, length in zip(turns, self.lengths, strict=True)]

    @property
    def n_tokens(self) -> int:
        return sum(self.trained)


@dataclass(frozen=True, eq=False)
class Group:
    """G completions of one prompt, with tokens, behaviour logprobs and rewards."""

    submission: str
    policy_version: int
    prompt: Array | Sequence[int]  # int32 (P,)
    completions: Sequence[Array | Sequence[int]]  # int32 tokens of each completion
    behaviour: Sequence[Array | Sequence[float]]  # float32 logprobs of trained tokens under the sampling version
    rewards: list[float]
    turns: list[list[int]] = field(default_factory=list)
    checked: bool = True
    number: int = 0

    @cached_property
    def outline(self) -> Outline:
        return Outline(
            self.submission,
            self.number,
            self.policy_version,
            len(self.prompt),
            [len(tokens) for tokens in self.completions],
            self.rewards,
            self.turns,
            self.checked,
        )

    @property
    def trained(self) -> list[int]:
        return self.outline.trained

    @property
    def n_tokens(self) -> int:
        return self.outline.n_tokens


AnyGroup = Group | Outline  # the leader has Groups, and the other ranks have Outlines


def outline_of(group: AnyGroup) -> Outline:
    return group.outline if isinstance(group, Group) else group


def encode(groups: Sequence[Group]) -> bytes:
    """Encode the groups' outlines as JSON, which keeps floats exactly."""
    return json.dumps([asdict(group.outline) for group in groups]).encode()


def decode(data: bytes) -> list[Outline]:
    """Decode outlines that `encode` encoded."""
    return [Outline(**fields) for fields in json.loads(data)]


@dataclass(frozen=True)
class AcceptedFile:
    """An accepted rollout file as arrays."""

    header: Header
    columns: Columns

    def numbers(self, name: str) -> Array:
        """Return a column that has one number per rollout."""
        return self.columns[name].values

    def slices(self, name: str, rows: range) -> list[Array]:
        """Return these rollouts' lists from a list column, as views."""
        column = self.columns[name]
        assert column.lengths is not None
        ends = np.cumsum(column.lengths[: rows.stop], dtype=np.int64)
        return [column.values[ends[row] - column.lengths[row] : ends[row]] for row in rows]

    def __len__(self) -> int:
        return len(self.columns["group"])


@dataclass(frozen=True)
class Fetched:
    """The groups to train on, and the number of groups left out, by reason."""

    groups: list[Group]
    contents: dict[str, str] = field(default_factory=dict)  # digest of the accepted file's rows, by submission
    refused: int = 0  # groups older than the async level allows
    quarantined: int = 0  # groups in files that are damaged or break the schema
    foreign: int = 0  # groups that no current validator signed, of another run or a future version, or incomplete
    implausible: int = 0  # groups with an impossible logprob or reward

    @property
    def left_out(self) -> str:
        """How many groups were left out, and why, as text for log lines and errors."""
        return (
            f"{self.refused} are too old, {self.foreign} are not this run's, {self.implausible} have impossible values, "
            f"{self.quarantined} are in damaged files"
        )


class Gathering:
    """Reads and verifies the groups of one step's batch. Each file is read once."""

    def __init__(self, read: Callable[[str], bytes], *, run: str, config: Config, quarantine: Path) -> None:
        """`read` returns a submission's accepted file."""
        self.read = read
        self.run = run
        self.config = config
        self.quarantine = quarantine
        self._owners: dict[str, str] = {}  # by content: the first submission of the batch with these rows
        self._files: dict[str, AcceptedFile | None] = {}  # None if it is damaged or breaks the schema

    def fetch(self, batch: Batch) -> None:
        """Read the batch's files. Raise NodeError if a download fails, unless the coordinator's file is damaged."""
        for submission in dict.fromkeys(member.submission for member in batch.groups):
            if submission not in self._files:
                try:
                    data = self.read(submission)
                except RefusedError as error:
                    if error.status != 410:
                        raise
                    log.error("the step continues without %s: %s", submission, error)
                    self._files[submission] = None
                else:
                    self._files[submission] = _parsed(data, submission, self.config, self.quarantine)

    def gather(self, batch: Batch, validators: set[str]) -> Fetched:
        """Verify a full batch. `validators` are the keys that may sign accepted files.

        Raise NodeError if a download fails.
        """
        self.fetch(batch)
        files = {member.submission: self._files[member.submission] for member in batch.groups}
        self._owners = {file.header.content: name for name, file in reversed(files.items()) if file is not None}
        judged = [self._judge(batch.step, member.submission, member.group, validators) for member in batch.groups]
        return Fetched(
            [each for each in judged if isinstance(each, Group)],
            {submission: file.header.content for submission, file in files.items() if file is not None},
            **Counter(each for each in judged if isinstance(each, str)),
        )

    def _judge(self, step: int, submission: str, number: int, validators: set[str]) -> Group | str:
        """Return the group. If it is left out, return the name of the field of Fetched that counts it."""
        size = self.config.sampling.group_size
        file = self._files[submission]
        if file is None:
            return "quarantined"
        problem = _origin_fault(validators, self.run, step, file)
        if problem := problem or _copy_fault(submission, file.header, self._owners) or _group_fault(file, number, size):
            log.error("group %d of %s is left out: %s", number, submission, problem)
            return "foreign"
        if step - file.header.policy_version > self.config.coordinator.async_level:
            return "refused"
        group = _group(file, submission, number, size)
        if problem := implausible_value(group):
            log.error("group %d of %s is left out: %s", number, submission, problem)
            return "implausible"
        return group


def gathering(node: Node, config: Config, quarantine: Path) -> Gathering:
    """Return a Gathering that downloads accepted files from the pool."""
    limit = config.max_submission_bytes  # the same limit as the coordinator's

    def download(submission: str) -> bytes:
        return node.fetch_file(f"/v1/accepted/{submission}", max_bytes=limit)

    return Gathering(download, run=node.invite.run, config=config, quarantine=quarantine)


def validators(node: Node) -> set[str]:
    """Return the keys that may sign accepted files now."""
    return set(node.descriptor().keys.get("validator", []))


def implausible_value(group: Group) -> str:
    """Describe the first impossible logprob or reward of a group; return "" if there is none.

    One such value would dominate the batch or make a metric infinite. Unchecked logprobs are not used, so they may have any
    value.
    """
    for logprobs, trained in zip(group.behaviour, group.trained, strict=True):
        if len(logprobs) != trained:
            return f"there are {len(logprobs)} logprobs for {trained} sampled tokens"
        values = np.asarray(logprobs)
        wrong = values[~((values >= LOWEST_LOGPROB) & (values <= HIGHEST_LOGPROB))]  # includes NaN
        if group.checked and len(wrong):
            return f"a logprob of {wrong[0]:g} is outside [{LOWEST_LOGPROB:g}, 0]"
    for value in group.rewards:
        if not within(abs(value), LARGEST_REWARD):
            return f"a reward of {value:g} is outside [-{LARGEST_REWARD:g}, {LARGEST_REWARD:g}]"
    return ""


def _parsed(data: bytes, submission: str, config: Config, quarantine: Path) -> AcceptedFile | None:
    max_rows = max_rollouts(config)
    longest = max(config.sampling.max_tokens, LONGEST_PROMPT)  # bound on the length of a prompt or a completion
    try:
        return AcceptedFile(*accepted_columns(data, max_rows=max_rows, max_tokens=longest))
    except RolloutFileError as error:
        path = quarantine / f"{submission}.parquet"
        write_file(path, data)
        log.error("accepted file %s is moved to %s, and the step continues without it: %s", submission, path, error)
        return None


def _origin_fault(validators: set[str], run: str, step: int, file: AcceptedFile) -> str:
    """Return why the file must not be trained on, or ""."""
    header = file.header
    if header.signer not in validators:
        return f"its file is signed by {header.signer[:16]}, which is not a validator of this run"
    if header.run != run or header.policy_version > step:
        return f"its file belongs to run {header.run}, policy version {header.policy_version}"
    return ""


def _copy_fault(submission: str, header: Header, owners: dict[str, str]) -> str:
    """Return why the file may be another submission's, so that a group would train twice, or ""."""
    if submission != (signed := f"{header.worker[:16]}-{header.submission:06d}"):
        return f"its file is that of submission {signed}"
    if submission != (owner := owners[header.content]):
        return f"its file has the rows of submission {owner}"
    return ""


def _group_fault(file: AcceptedFile, number: int, size: int) -> str:
    rows = range(number * size, (number + 1) * size)
    if rows.stop > len(file) or (file.numbers("group")[rows.start : rows.stop] != number).any():
        return f"its file has no whole group {number}"
    first, *others = file.slices("prompt", rows)
    if not all(np.array_equal(first, other) for other in others):
        return f"its file has no whole group {number}"
    if not len(first) or not all(len(tokens) for tokens in file.slices("tokens", rows)):
        return "a prompt or a completion is empty"
    return ""


def _group(file: AcceptedFile, submission: str, number: int, size: int) -> Group:
    rows = range(number * size, (number + 1) * size)
    return Group(
        submission=submission,
        policy_version=file.header.policy_version,
        prompt=file.slices("prompt", rows[:1])[0],
        completions=file.slices("tokens", rows),
        behaviour=file.slices("logprobs", rows),
        rewards=file.numbers("reward")[rows.start : rows.stop].tolist(),
        checked=file.header.prefilled,
        turns=[turns.tolist() for turns in file.slices("turns", rows)],
        number=number,
    )


# --- waiting for a batch -------------------------------------------------------------------------------------------------

POLL_S = 0.1
PREFETCH_POLL_S = 1.0  # between polls for the next step's batch while a step trains


@dataclass(frozen=True)
class StepBatch:
    """The groups that a step trains on."""

    step: int
    groups: Sequence[AnyGroup]
    fetched: Fetched = field(default_factory=lambda: Fetched([]))  # filled on the leader alone
    members: Sequence[BatchGroup] = ()  # the whole batch, including groups left out; filled on the leader alone
    waited_s: float = 0.0  # time until the batch was full
    full_s: float = 0.0  # `time.monotonic()` when the batch was full


class IncomingBatches:
    """Waits for each step's batch. `node` is the leader's connection to the pool, and None on the other ranks."""

    def __init__(self, node: Node | None, ranks: Ranks, config: Config, quarantine: Path) -> None:
        self.node = node
        self.ranks = ranks
        self.config = config
        self.quarantine = quarantine
        self._prefetch: Prefetch | None = None

    def wait(self, step: int, stop: threading.Event) -> StepBatch | None:
        """Wait until the step's batch is full and return it, on every rank. Return None if `stop` is set first.

        Raise NodeError if a download fails.
        """
        if self.node is None:
            message = self.ranks.broadcast(None)
            return StepBatch(step, decode(message)) if message else None
        message = b""
        try:
            result = self._gathered(self.node, step, stop)
            if result is not None:
                message = encode(result.fetched.groups) if self.ranks.size > 1 else b""
            return result
        finally:  # the other ranks wait for this message even if an error is raised
            if self.ranks.size > 1:
                self.ranks.broadcast(message)

    def prefetch(self, step: int) -> None:
        """Start fetching this step's files in the background."""
        if self.node is not None and step < self.config.run.steps:
            self._prefetch = Prefetch(step, self.node, gathering(self.node, self.config, self.quarantine))
            self._prefetch.start()

    def _gathered(self, node: Node, step: int, stop: threading.Event) -> StepBatch | None:
        started_s = time.monotonic()
        node.doing(f"the batch of step {step + 1}", waiting=True)
        prefetch, self._prefetch = self._prefetch, None
        files = prefetch.take() if prefetch else gathering(node, self.config, self.quarantine)
        while not stop.is_set():
            batch = node.get(f"/v1/batches/{step}", Batch)
            if batch.ready:
                node.doing(f"training step {step + 1}")
                full_s = time.monotonic()
                fetched = files.gather(batch, validators(node))
                return StepBatch(step, fetched.groups, fetched, batch.groups, full_s - started_s, full_s)
            stop.wait(POLL_S)
        return None


class Prefetch(threading.Thread):
    """Fetches a step's files while the previous step trains."""

    def __init__(self, step: int, node: Node, gathering: Gathering) -> None:
        super().__init__(name=f"prefetch of step {step}", daemon=True)
        self.step = step
        self.node = node
        self._gathering = gathering
        self._ended = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            while not self._ended.is_set():
                batch = self.node.get(f"/v1/batches/{self.step}", Batch)
                if batch.ready:
                    return self._gathering.fetch(batch)
                self._ended.wait(PREFETCH_POLL_S)
        except (ShoalError, OSError) as error:  # `take` raises it in the loop's thread
            self._error = error

    def take(self) -> Gathering:
        """Stop polling, wait for downloads in progress, and return the fetched files. Raise the thread's error."""
        self._ended.set()
        self.join()
        if self._error is not None:
            raise self._error
        return self._gathering
