"""A validator and workers, honest or lying, run in one process on a tiny random llama, without a coordinator."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shoal.config import Config
from shoal.model.dtype import DtypeName
from shoal.protocol.calling import RefusedError
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Assignment, Claim
from shoal.validator.case import Case
from shoal.validator.judge import Judge
from shoal.validator.service import Validator
from shoal.validator.verdict import Result

from .. import workers
from ..workers import ALICE, VALIDATOR, FakeNode

EOS, USER, GROUP_SIZE, MAX_TOKENS = 1, 2, 4, 40  # USER: a special token, but not an end token


def config(**sections: Any) -> Config:
    """Return a config with two groups of four completions. The longest have 40 tokens, so 2 proof chunks."""
    base: dict[str, Any] = {
        "tasks": {"length_targets": [8, 16, 32]},
        "sampling": {"max_tokens": MAX_TOKENS, "group_size": GROUP_SIZE},
        "workers": {"groups_per_submission": workers.GROUPS},
    }
    return workers.config(**{name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}})


SETTINGS = config()
assignment = partial(workers.assignment, step=3, version=2)
make_producer = partial(workers.make_producer, version=2)
ASSIGNMENT = assignment()


@dataclass
class ValidatorsNode(FakeNode):
    """The part of a `Node` that validators use."""

    identity: Identity = VALIDATOR
    files: dict[str, bytes] = field(default_factory=dict)  # uploaded file by submission

    def fetch_file(self, path: str, *, max_bytes: int) -> bytes:
        if (id := path.removeprefix("/v1/submissions/")) not in self.files:
            raise RefusedError("the file is missing", 410)
        return self.files[id]


class LocalValidator(Validator):
    """A validator whose weights are in its `cache` folder, without a manifest."""

    def fetch(self, version: int, digest: str | None) -> Any:
        return self.cache, SimpleNamespace(version=version, digest="0" * 64)

    def _cache(self) -> Any:
        return SimpleNamespace(held=self.fetch)


def make_validator(
    folder: Path,
    settings: Config,
    dtype: DtypeName = "float32",
    version: int = 2,
    fingerprint: Callable[[Any], str] = lambda model: "",
) -> Validator:
    """Return a validator that has loaded the weights in `folder` as `version`."""
    node: Any = ValidatorsNode()
    validator = LocalValidator(node, settings, folder, "", dtype, None, fingerprint)
    validator.load(version)
    return validator


def claim(given: Assignment = ASSIGNMENT, worker: Identity = ALICE, *, full: bool = True) -> Claim:
    return Claim(assignment=given, worker=worker.public, lease_s=0.0, full=full)


def checked(validator: Validator, claim: Claim, data: bytes) -> tuple[Result, bytes | None]:
    """Return the validator's result for one file, and the accepted file."""
    validator.node.files[claim.assignment.id] = data  # type: ignore[attr-defined]
    [result] = validator.check([claim])
    return result, result.accepted


def judged(validator: Validator, given: Assignment, data: bytes, worker: Identity = ALICE) -> Result:
    return checked(validator, claim(given, worker), data)[0]


def case_of(judge: Judge, given: Assignment, data: bytes) -> Case:
    """Return the case of a file, which must be readable."""
    case = judge.open(given, ALICE.public, data)
    assert isinstance(case, Case), case
    return case
