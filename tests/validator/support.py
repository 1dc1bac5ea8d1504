"""A validator and honest or lying workers in one process: no coordinator, no network, a tiny random llama."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.config import Config, parse
from shoal.messages import Assignment, Claim, ContentOwner, Stored, Verdict
from shoal.model.dtype import DtypeName
from shoal.model.load import eos_ids, load_model, load_tokenizer
from shoal.pool.identity import Identity
from shoal.rollout.engine import Completion
from shoal.rollout.torch_engine import TorchEngine
from shoal.rollout.worker import Worker
from shoal.store.rollouts import Rollout
from shoal.validator.service import Validator

ALICE, BOB, VALIDATOR = (Identity(Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32)) for n in (1, 2, 3))
RUN, EOS, GROUPS, GROUP_SIZE, MAX_TOKENS = "test-0", 1, 2, 4, 40
Edit = Callable[[Completion], Completion]


def config(**sections: Any) -> Config:
    """Two groups of four completions of at most 40 tokens: a whole proof and a short one each."""
    base: dict[str, Any] = {
        "tasks": {"heldout": 16, "prompt": "{question}=", "length_targets": [8, 16, 32]},
        "sampling": {"max_tokens": MAX_TOKENS, "group_size": GROUP_SIZE},
        "workers": {"groups_per_submission": GROUPS},
        "validator": {"row_tokens": 128},
        "evaluator": {"n": 16, "n_between": 16},
    }
    return parse({name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}})


@dataclass
class FakeNode:
    """As much of a `Node` as worker and validator touch; keeps what was put."""

    identity: Identity
    invite: Any = field(default_factory=lambda: SimpleNamespace(run=RUN))
    policy_version: int | None = None
    tokens: int = 0
    owner: str | None = None
    files: list[bytes] = field(default_factory=list)

    def doing(self, what: str, *, waiting: bool = False) -> None: ...

    def put(self, path: str, data: bytes, answer: type[Stored]) -> None:
        self.files.append(data)

    def get(self, path: str, answer: type[ContentOwner]) -> ContentOwner:
        return ContentOwner(submission=self.owner)


def assignment(number: int = 0, *, worker: Identity = ALICE, step: int = 3, version: int = 2) -> Assignment:
    id = f"{worker.public[:16]}-{number:06d}"
    return Assignment(
        id=id,
        number=number,
        step=step,
        policy_version=version,
        policy_digest="d" * 64,
        groups=GROUPS,
        deadline_s=0.0,
        upload_path=f"/v1/submissions/{id}",
        max_bytes=1 << 20,
    )


def make_worker(
    folder: Path,
    settings: Config,
    kind: type[Worker] = Worker,
    *,
    identity: Identity = ALICE,
    dtype: DtypeName = "float32",
    version: int = 2,
) -> Worker:
    """A worker of `kind` that holds the weights in `folder` and says that they are `version`."""
    worker = kind(FakeNode(identity), settings, TorchEngine(dtype))  # type: ignore[arg-type]
    worker.take_weights((folder, SimpleNamespace(version=version)))  # type: ignore[arg-type]
    return worker


def make_validator(folder: Path, settings: Config, dtype: DtypeName = "float32", version: int = 2) -> Validator:
    """A validator that holds the weights in `folder` as `version`."""
    validator = Validator(FakeNode(VALIDATOR, policy_version=version), settings, folder, "", dtype)  # type: ignore[arg-type]
    validator.model = load_model(folder, dtype)
    validator.tokenizer, validator.eos_ids = load_tokenizer(folder), eos_ids(folder)
    return validator


def signed(worker: Worker, asked: Assignment, rows: list[Rollout]) -> bytes:
    """The file this worker hands in for `asked`."""
    files: list[bytes] = worker.node.files  # type: ignore[attr-defined]
    worker.hand_in(asked, rows)
    return files.pop()


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
