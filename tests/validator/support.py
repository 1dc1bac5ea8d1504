"""A validator and honest or lying workers in one process: no coordinator, no network, a tiny random llama."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shoal.config import Config
from shoal.messages import Assignment, Claim, ContentOwner, Verdict
from shoal.model.dtype import DtypeName
from shoal.model.load import eos_ids, load_model, load_tokenizer
from shoal.pool.identity import Identity
from shoal.rollout.engine import Completion
from shoal.rollout.torch_engine import TorchEngine
from shoal.rollout.worker import Worker
from shoal.store.rollouts import Rollout
from shoal.validator.service import Validator

from .. import workers
from ..workers import ALICE, VALIDATOR, FakeNode

EOS, GROUP_SIZE, MAX_TOKENS = 1, 4, 40
Edit = Callable[[Completion], Completion]


def config(**sections: Any) -> Config:
    """Two groups of four completions of at most 40 tokens: a whole proof and a short one each."""
    base: dict[str, Any] = {
        "tasks": {"length_targets": [8, 16, 32]},
        "sampling": {"max_tokens": MAX_TOKENS, "group_size": GROUP_SIZE},
        "validator": {"row_tokens": 128},
    }
    return workers.config(**{name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}})


SETTINGS = config()
assignment = partial(workers.assignment, step=3, version=2)
make_worker = partial(workers.make_worker, version=2)
ASKED = assignment()


@dataclass
class ValidatorsNode(FakeNode):
    """As much of a `Node` as a validator touches besides."""

    identity: Identity = VALIDATOR
    owner: str | None = None

    def get(self, path: str, answer: type[ContentOwner]) -> ContentOwner:
        return ContentOwner(submission=self.owner)


def make_validator(folder: Path, settings: Config, dtype: DtypeName = "float32", version: int = 2) -> Validator:
    """A validator that holds the weights in `folder` as `version`."""
    validator = Validator(ValidatorsNode(policy_version=version), settings, folder, "", dtype)  # type: ignore[arg-type]
    validator.model = load_model(folder, dtype)
    validator.tokenizer, validator.eos_ids = load_tokenizer(folder), eos_ids(folder)
    return validator


def signed(worker: Worker, asked: Assignment, rows: list[Rollout]) -> bytes:
    """The file this worker hands in for `asked`."""
    worker.hand_in(asked, rows)
    return worker.node.uploads.popitem()[1]  # type: ignore[attr-defined]


def judged(validator: Validator, asked: Assignment, data: bytes, worker: Identity = ALICE) -> Verdict:
    return validator.check(Claim(assignment=asked, worker=worker.public, lease_s=0.0), data)[0]


class Edited:
    """An engine whose completions are changed before the worker proves and signs them."""

    def __init__(self, engine: TorchEngine, edit: Edit) -> None:
        self.engine, self.edit = engine, edit

    def load(self, folder: Path) -> None:
        self.engine.load(folder)

    def generate(self, *arguments: Any) -> list[list[Completion]]:
        return [[self.edit(completion) for completion in group] for group in self.engine.generate(*arguments)]
