"""The groups of one step: accepted files, downloaded and checked again here, because what trains is believed by nobody.

Invariant: every row is under a registered validator's signature and within the async level. A file that breaks the schema
is put aside under its name and the step goes on without it.
Called by the learner's loop on the leading rank; `encode` and `decode` carry groups to the others.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.config import Config
from shoal.errors import ShoalError
from shoal.protocol.messages import Batch
from shoal.protocol.node import Node
from shoal.store.rollouts import AcceptedRollout, RolloutFile, RolloutFileError, read_accepted

log = logging.getLogger(__name__)


class BatchError(ShoalError):
    """A batch that must not be trained on."""


@dataclass(frozen=True)
class Group:
    """G completions of one prompt, with what training needs of them."""

    submission: str
    policy_version: int
    prompt: list[int]
    completions: list[list[int]]
    behaviour: list[list[float]]  # logprobs under the version that sampled, as the validator computed them
    rewards: list[float]

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.completions))


@dataclass(frozen=True)
class Fetched:
    groups: list[Group]
    refused: int  # groups older than the async level
    quarantined: int  # groups of files that break the schema


def fetch(node: Node, batch: Batch, config: Config, quarantine: Path) -> Fetched:
    """Download and check a full batch. Raises BatchError where none of it may be trained on."""
    validators = set(node.descriptor().keys.get("validator", []))
    files: dict[str, RolloutFile[AcceptedRollout] | None] = {}
    groups, refused, quarantined = [], 0, 0
    for member in batch.groups:
        if member.submission not in files:
            files[member.submission] = _read(node, member.submission, config, quarantine)
        file = files[member.submission]
        if file is None:
            quarantined += 1
            continue
        _check_origin(validators, node.invite.run, batch.step, member.submission, file)
        if batch.step - file.header.policy_version > config.coordinator.async_level:
            refused += 1
            continue
        groups.append(_group(file, member.submission, member.group, config.sampling.group_size))
    if not groups:
        raise BatchError(
            f"step {batch.step}: nothing to train on; {refused} groups are older than {config.coordinator.async_level} "
            f"versions, {quarantined} are of files put aside in {quarantine}"
        )
    return Fetched(groups, refused, quarantined)


def _read(node: Node, submission: str, config: Config, quarantine: Path) -> RolloutFile[AcceptedRollout] | None:
    data = node.get_bytes(f"/v1/accepted/{submission}")
    max_rows = config.workers.groups_per_submission * config.sampling.group_size
    try:
        return read_accepted(data, max_rows=max_rows, max_tokens=config.learner.row_tokens)
    except RolloutFileError as error:
        quarantine.mkdir(parents=True, exist_ok=True)
        path = quarantine / f"{submission}.parquet"
        path.write_bytes(data)
        log.error("accepted file %s is put aside as %s, the step goes on without it: %s", submission, path, error)
        return None


def _check_origin(
    validators: set[str], run: str, step: int, submission: str, file: RolloutFile[AcceptedRollout]
) -> None:
    header = file.header
    if header.signer not in validators:
        raise BatchError(f"{submission} is signed by {header.signer[:16]}, which is no validator of this run")
    if header.run != run or header.policy_version > step:
        raise BatchError(f"{submission} is of run {header.run}, version {header.policy_version}")


def _group(file: RolloutFile[AcceptedRollout], submission: str, number: int, size: int) -> Group:
    rows = file.rows[number * size : (number + 1) * size]
    if len(rows) != size or any(row.group != number or row.prompt != rows[0].prompt for row in rows):
        raise BatchError(f"{submission} has no whole group {number}")
    return Group(
        submission=submission,
        policy_version=file.header.policy_version,
        prompt=rows[0].prompt,
        completions=[row.tokens for row in rows],
        behaviour=[row.logprobs for row in rows],
        rewards=[row.reward for row in rows],
    )


def encode(groups: Sequence[Group]) -> bytes:
    """As JSON, in which floats survive exactly."""
    return json.dumps([asdict(group) for group in groups]).encode()


def decode(data: bytes) -> list[Group]:
    return [Group(**fields) for fields in json.loads(data)]
