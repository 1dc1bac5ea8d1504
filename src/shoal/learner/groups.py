"""The groups of one step: accepted files, downloaded and verified again. The learner trusts no other process.

Tokens and logprobs stay what the file holds: arrays.
Invariant: every row is signed by a registered validator, is within the async level, and holds possible values. A file that
breaks the schema is quarantined under its name. Groups of it, of a file that is not this run's, too old or implausible ones
are left out and counted. A full batch never changes, so whatever is in it must not stop the learner: it would be stopped by
the same batch at each restart.
Called by `incoming` on the leading rank, and by the audit.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shoal.config import Config
from shoal.files import write_file
from shoal.learner.group import Array
from shoal.learner.group import Group as Group
from shoal.model.sampling import LOWEST_LOGPROB
from shoal.protocol.messages import Batch
from shoal.protocol.node import Node
from shoal.protocol.transfer import fetch_file
from shoal.store.columns import Column, Columns
from shoal.store.rollouts import Header, RolloutFileError, accepted_columns
from shoal.tasks.derive import max_rollouts

HIGHEST_LOGPROB = 1e-3
LARGEST_REWARD = 1e6
LONGEST_PROMPT = 1 << 17  # tokens; bounds what reading an accepted file may allocate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class File:
    """An accepted file as arrays."""

    header: Header
    columns: Columns

    def numbers(self, name: str) -> Array:
        """A column with one number for each rollout."""
        return self.columns[name].values

    def slices(self, name: str, rows: range) -> list[Array]:
        """The lists of these rollouts, as views."""
        return slices(self.columns[name], rows)

    def __len__(self) -> int:
        return len(self.columns["group"])


def slices(column: Column, rows: range) -> list[Array]:
    assert column.lengths is not None
    ends = np.cumsum(column.lengths[: rows.stop], dtype=np.int64)
    return [column.values[ends[row] - column.lengths[row] : ends[row]] for row in rows]


@dataclass(frozen=True)
class Fetched:
    """The groups to train on, and how many groups of the batch were left out, by reason."""

    groups: list[Group]
    contents: dict[str, str] = field(default_factory=dict)  # by submission: the digest of its accepted file's rows
    refused: int = 0  # older than the async level
    quarantined: int = 0  # in files that break the schema
    foreign: int = 0  # in files of no validator of this run (any more), of another run or version, or not whole
    implausible: int = 0  # with a logprob or reward that cannot be true

    @property
    def left_out(self) -> str:
        """For a person: how many groups were left out, and why."""
        return (
            f"{self.refused} are too old, {self.foreign} are not this run's, {self.implausible} hold impossible values, "
            f"{self.quarantined} are in files moved to quarantine"
        )


class Gathering:
    """One step's groups, as its batch fills. Each file is read once, and each group is judged once."""

    def __init__(self, read: Callable[[str], bytes], *, run: str, config: Config, quarantine: Path) -> None:
        """`read` gives the accepted file of a submission."""
        self.read = read
        self.run = run
        self.config = config
        self.quarantine = quarantine
        self.validators: set[str] = set()
        self._files: dict[str, File | None] = {}
        self._judged: dict[tuple[str, int], Group | str] = {}

    def gather(self, batch: Batch, validators: set[str]) -> Fetched:
        """Verify a batch, or what it holds so far. Raises NodeError if a file cannot be had."""
        if validators != self.validators:
            self.validators = validators
            self._judged.clear()
        members = [(member.submission, member.group) for member in batch.groups]
        for submission, number in members:
            if (submission, number) not in self._judged:
                self._judged[submission, number] = self._judge(batch.step, submission, number)
        found = [self._judged[member] for member in members]
        left_out = Counter(one for one in found if isinstance(one, str))
        files = {submission: self._files[submission] for submission, _ in members}
        contents = {submission: file.header.content for submission, file in files.items() if file is not None}
        return Fetched([one for one in found if isinstance(one, Group)], contents, **left_out)

    def _judge(self, step: int, submission: str, number: int) -> Group | str:
        """The group, or the field of Fetched that counts why it is left out."""
        size = self.config.sampling.group_size
        if submission not in self._files:
            self._files[submission] = _read(self.read(submission), submission, self.config, self.quarantine)
        file = self._files[submission]
        if file is None:
            return "quarantined"
        if problem := _origin_fault(self.validators, self.run, step, file) or _group_fault(file, number, size):
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
    """Of files that are downloaded from the pool."""
    limit = config.coordinator.max_submission_bytes  # the coordinator takes no larger file from a validator either

    def download(submission: str) -> bytes:
        return fetch_file(node, f"/v1/accepted/{submission}", most_bytes=limit)

    return Gathering(download, run=node.invite.run, config=config, quarantine=quarantine)


def validators(node: Node) -> set[str]:
    """The keys that may sign accepted files now."""
    return set(node.descriptor().keys.get("validator", []))


def gather(
    batch: Batch, read: Callable[[str], bytes], *, validators: set[str], run: str, config: Config, quarantine: Path
) -> Fetched:
    """Verify a full batch; `read` gives the accepted file of a submission."""
    return Gathering(read, run=run, config=config, quarantine=quarantine).gather(batch, validators)


def implausible_value(group: Group) -> str:
    """What cannot be true of a group's logprobs and rewards; empty if everything can.

    One such value would dominate the batch or make a metric infinite. Logprobs that nobody checked are the worker's own and
    are not used, so they may have any value.
    """
    for logprobs, trained in zip(group.behaviour, group.trained, strict=True):
        if len(logprobs) != trained:
            return f"there are {len(logprobs)} logprobs for {trained} sampled tokens"
        values = np.asarray(logprobs)
        wrong = values[~((values >= LOWEST_LOGPROB) & (values <= HIGHEST_LOGPROB))]  # NaN, too
        if group.checked and len(wrong):
            return f"a logprob of {wrong[0]:g} is outside [{LOWEST_LOGPROB:g}, 0]"
    for value in group.rewards:
        if not abs(value) <= LARGEST_REWARD:  # nor NaN
            return f"a reward of {value:g} is outside [-{LARGEST_REWARD:g}, {LARGEST_REWARD:g}]"
    return ""


def _read(data: bytes, submission: str, config: Config, quarantine: Path) -> File | None:
    max_rows = max_rollouts(config)
    longest = max(config.sampling.max_tokens, LONGEST_PROMPT)  # of a prompt or a completion
    try:
        return File(*accepted_columns(data, max_rows=max_rows, max_tokens=longest))
    except RolloutFileError as error:
        path = quarantine / f"{submission}.parquet"
        write_file(path, data)
        log.error("accepted file %s is moved to %s, and the step continues without it: %s", submission, path, error)
        return None


def _origin_fault(validators: set[str], run: str, step: int, file: File) -> str:
    """Why the file must not be trained on; empty if it may."""
    header = file.header
    if header.signer not in validators:
        return f"it is signed by {header.signer[:16]}, which is not a validator of this run"
    if header.run != run or header.policy_version > step:
        return f"it is of run {header.run}, version {header.policy_version}"
    return ""


def _group_fault(file: File, number: int, size: int) -> str:
    rows = range(number * size, (number + 1) * size)
    if rows.stop > len(file) or (file.numbers("group")[rows.start : rows.stop] != number).any():
        return f"its file has no whole group {number}"
    first, *others = file.slices("prompt", rows)
    if not all(np.array_equal(first, other) for other in others):
        return f"its file has no whole group {number}"
    if not len(first) or not all(len(tokens) for tokens in file.slices("tokens", rows)):
        return "a prompt or a completion is empty"
    return ""


def _group(file: File, submission: str, number: int, size: int) -> Group:
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
