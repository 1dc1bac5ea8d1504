"""The groups of one step: accepted files, downloaded and verified again. The learner trusts no other process.

Invariant: every row is signed by a registered validator, is within the async level, and holds possible values. A file that
breaks the schema is quarantined under its name. Groups of it, of a file that is not this run's, too old or implausible ones
are left out and counted. A full batch never changes, so whatever is in it must not stop the learner: it would be stopped by
the same batch at each restart.
Called by `incoming` on the leading rank, and by the audit. `encode` and `decode` carry groups to the other ranks.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal.config import Config
from shoal.files import write_file
from shoal.model.sampling import LOWEST_LOGPROB
from shoal.model.turns import fit, model_tokens
from shoal.protocol.messages import Batch
from shoal.protocol.node import Node
from shoal.protocol.transfer import fetch_file
from shoal.store.rollouts import AcceptedRollout, RolloutFile, RolloutFileError, read_accepted
from shoal.tasks.derive import max_rollouts

HIGHEST_LOGPROB = 1e-3
LARGEST_REWARD = 1e6
LONGEST_PROMPT = 1 << 17  # tokens; bounds what reading an accepted file may allocate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """G completions of one prompt, with what training needs of them."""

    submission: str
    policy_version: int
    prompt: list[int]
    completions: list[list[int]]
    behaviour: list[list[float]]  # logprobs of trained tokens under the sampling version, from the accepted file
    rewards: list[float]
    turns: list[list[int]] = field(default_factory=list)  # of each completion, see `model/turns`; []: all are single
    checked: bool = True  # false: the behaviour logprobs are the worker's own, and are not used
    number: int = 0  # in its submission

    @property
    def trained(self) -> list[int]:
        """How many tokens of each completion are trained on: those that the model wrote."""
        turns = self.turns or [[]] * len(self.completions)
        return [model_tokens(of, len(tokens)) for of, tokens in zip(turns, self.completions, strict=True)]

    @property
    def n_tokens(self) -> int:
        return sum(self.trained)


@dataclass(frozen=True)
class Fetched:
    """The groups to train on, and how many groups of the batch were left out, by reason."""

    groups: list[Group]
    contents: dict[str, str] = field(default_factory=dict)  # by submission: the digest of its accepted file's rows
    refused: int = 0  # older than the async level
    quarantined: int = 0  # in files that break the schema
    foreign: int = 0  # in files of no validator of this run (any more), of another run or version, or not whole
    implausible: int = 0  # with a logprob, reward or turns that cannot be true

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
        self._files: dict[str, RolloutFile[AcceptedRollout] | None] = {}
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
    """What cannot be true of a group's logprobs, rewards and turns; empty if everything can.

    One such value would dominate the batch or make a metric infinite. Logprobs that nobody checked are the worker's own and
    are not used, so they may have any value.
    """
    for turns, tokens in zip(group.turns, group.completions, strict=bool(group.turns)):
        if not fit(turns, len(tokens)):
            return f"turns of {turns[:8]} do not fit {len(tokens)} tokens"
    for logprobs, trained in zip(group.behaviour, group.trained, strict=True):
        if len(logprobs) != trained:
            return f"there are {len(logprobs)} logprobs for {trained} sampled tokens"
        for value in logprobs if group.checked else ():
            if not LOWEST_LOGPROB <= value <= HIGHEST_LOGPROB:  # not for NaN either
                return f"a logprob of {value:g} is outside [{LOWEST_LOGPROB:g}, 0]"
    for value in group.rewards:
        if not abs(value) <= LARGEST_REWARD:  # nor NaN
            return f"a reward of {value:g} is outside [-{LARGEST_REWARD:g}, {LARGEST_REWARD:g}]"
    return ""


def _read(data: bytes, submission: str, config: Config, quarantine: Path) -> RolloutFile[AcceptedRollout] | None:
    max_rows = max_rollouts(config)
    longest = max(config.sampling.max_tokens, LONGEST_PROMPT)  # of a prompt or a completion
    try:
        return read_accepted(data, max_rows=max_rows, max_tokens=longest)
    except RolloutFileError as error:
        path = quarantine / f"{submission}.parquet"
        write_file(path, data)
        log.error("accepted file %s is moved to %s, and the step continues without it: %s", submission, path, error)
        return None


def _origin_fault(validators: set[str], run: str, step: int, file: RolloutFile[AcceptedRollout]) -> str:
    """Why the file must not be trained on; empty if it may."""
    header = file.header
    if header.signer not in validators:
        return f"it is signed by {header.signer[:16]}, which is not a validator of this run"
    if header.run != run or header.policy_version > step:
        return f"it is of run {header.run}, version {header.policy_version}"
    return ""


def _group_fault(file: RolloutFile[AcceptedRollout], number: int, size: int) -> str:
    rows = file.rows[number * size : (number + 1) * size]
    if len(rows) != size or any(row.group != number or row.prompt != rows[0].prompt for row in rows):
        return f"its file has no whole group {number}"
    if not all(row.tokens for row in rows) or not rows[0].prompt:
        return "a prompt or a completion is empty"
    return ""


def _group(file: RolloutFile[AcceptedRollout], submission: str, number: int, size: int) -> Group:
    rows = file.rows[number * size : (number + 1) * size]
    return Group(
        submission=submission,
        policy_version=file.header.policy_version,
        prompt=rows[0].prompt,
        completions=[row.tokens for row in rows],
        behaviour=[row.logprobs for row in rows],
        rewards=[row.reward for row in rows],
        checked=file.header.prefilled,
        turns=[row.turns for row in rows],
        number=number,
    )


def encode(groups: Sequence[Group], *, after: int = 0, full: bool = True) -> bytes:
    """As JSON, which keeps floats exactly. They come after the first `after` that the other ranks have."""
    message = {"after": after, "full": full, "groups": [asdict(group) for group in groups]}
    return json.dumps(message).encode()


def decode(data: bytes, known: Sequence[Group] = ()) -> tuple[list[Group], bool]:
    """The step's groups of `encode`'s message, and whether its batch is full."""
    message = json.loads(data)
    return [*known[: message["after"]], *(Group(**fields) for fields in message["groups"])], message["full"]
