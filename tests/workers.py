"""Producers on a tiny random llama, without coordinator or network, for tests of workers, attacks and validators."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.config import Config, parse
from shoal.engine.torch_engine import TorchEngine
from shoal.model.dtype import DtypeName
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Assignment, Fingerprint, Finished
from shoal.shardcast import Access
from shoal.store.rollouts import Rollout
from shoal.worker.produce import Producer

ALICE, BOB, VALIDATOR = (Identity(Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32)) for n in (1, 2, 3))
RUN, GROUPS = "test-0", 2


def config(**sections: Any) -> Config:
    """Return a config for sums that a character tokenizer can write. A submission has two groups.

    `sections` override the config.
    """
    base: dict[str, Any] = {
        "tasks": {"heldout": 16, "prompt": "{question}="},
        "workers": {"groups_per_submission": GROUPS},
        "evaluator": {"n": 16},
    }
    return parse({name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}})


@dataclass
class FakeNode:
    """The part of a `Node` that workers and validators use. It keeps what is uploaded."""

    identity: Identity = ALICE
    invite: Any = field(default_factory=lambda: SimpleNamespace(run=RUN))
    policy_version: int | None = None
    tokens: int = 0
    fingerprint: Fingerprint | None = None
    renewals: int = 0
    working_on: list[str] = field(default_factory=list)
    finished: Finished | None = None
    uploads: dict[str, bytes] = field(default_factory=dict)

    def access(self, publisher: str, config: Config) -> Access:
        return Access(publisher, self.invite.run)

    def doing(self, what: str, *, waiting: bool = False) -> None: ...

    def renewal(self) -> int | None:
        return None

    def send_file(self, path: str, data: bytes) -> Any:
        self.uploads[path] = data


def assignment(number: int = 0, *, worker: Identity = ALICE, step: int = 0, version: int = 0) -> Assignment:
    id = f"{worker.public[:16]}-{number:06d}"
    return Assignment(
        id=id,
        number=number,
        step=step,
        policy_version=version,
        policy_digest="d" * 64,
        nonce=f"{number:032x}",
        groups=GROUPS,
        upload_path=f"/v1/submissions/{id}",
    )


def make_producer(
    folder: Path,
    settings: Config,
    kind: type[Producer] = Producer,
    *,
    identity: Identity = ALICE,
    dtype: DtypeName = "float32",
    version: int = 0,
) -> Any:
    """Return a producer of `kind` that has loaded the weights in `folder` as `version`."""
    producer = kind(settings, RUN, identity, TorchEngine(dtype))
    producer.load(folder, version)
    return producer


def produced(producer: Producer, asked: Assignment) -> list[Rollout]:
    """Return the rows that the producer would submit for `asked`, before they are signed."""
    plans = producer.plan(asked)
    groups = producer.complete([producer.prompt(plan) for plan in plans], plans)
    return producer.rollouts(plans, groups)


def signed(producer: Producer, asked: Assignment, rows: list[Rollout]) -> bytes:
    """Return these rows, signed for `asked` and its prompts, even if the producer used other prompts."""
    honest = Producer.plan(producer, asked)
    return producer.sign(asked, [producer.prompt(plan) for plan in honest], rows)
