"""A pool without HTTP, the requests of the other processes, and a clock that tests set.

`connect` opens SQLite; for tests that run on PostgreSQL too, `conftest` replaces it by `backends.on_postgres`.
"""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from prometheus_client.parser import text_string_to_metric_families

from shoal.config import Config, parse
from shoal.coordinator.http.reports import read_metrics, read_status
from shoal.coordinator.nodes import Member
from shoal.coordinator.pool import Pool
from shoal.ledger.chain import sign_opinion
from shoal.ledger.connection import Connection, SqliteConnection
from shoal.ledger.table import Ledger
from shoal.protocol.history import Status
from shoal.protocol.identity import Identity
from shoal.protocol.messages import (
    Assignment,
    Claim,
    Fingerprint,
    GroupResult,
    Heartbeat,
    HeartbeatAnswer,
    InvitePayload,
    Opinion,
    PolicyVersion,
    Reason,
    Replay,
    StepReport,
    ToleranceSpent,
    Verdict,
)

COORDINATOR = Identity(Ed25519PrivateKey.from_private_bytes(bytes(32)))
# Their keys begin with e, f and d.
SIGNERS = {
    each.public: each for n in (3, 9, 15) if (each := Identity(Ed25519PrivateKey.from_private_bytes(bytes([n] * 32))))
}
VALIDATOR, OTHER_VALIDATOR, THIRD_VALIDATOR = SIGNERS
FILE, ACCEPTED_FILE = "9" * 64, "8" * 64
ALICE, BOB, CAROL = "a" * 64, "b" * 64, "c" * 64


@dataclass
class Clock:
    now_s: float = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Harness:
    """A pool, and the requests that the other processes would send to it."""

    pool: Pool
    clock: Clock

    def join(self, key: str, role: Any = "worker", name: str = "") -> None:
        self.pool.members.register(key, payload(name or f"{role}-{key[0]}", role=role, nonce=key[:32]), None)

    def publish(self, *versions: int) -> None:
        for version in versions:
            self.pool.learning.published(PolicyVersion(version=version, digest=f"{version:064x}", size_bytes=1))

    def beat(
        self,
        key: str = ALICE,
        version: int | None = 0,
        *,
        wants: bool = True,
        fingerprint: str = "",
        renews: bool = True,
        working_on: list[str] | None = None,
    ) -> HeartbeatAnswer:
        """Send a node's heartbeat. `renews`: the node has completed every request for a new fingerprint."""
        computed = Fingerprint(version=version or 0, value=fingerprint) if fingerprint else None
        done = self.pool.members.checkers.renewals(key) if renews else 0
        beat = Heartbeat(
            policy_version=version, wants_task=wants, fingerprint=computed, renewals=done, working_on=working_on or []
        )
        return self.pool.members.heartbeat(key, beat)

    def task(self, key: str = ALICE, version: int | None = 0) -> Assignment:
        answer = self.beat(key, version)
        assert answer.assignment is not None, answer.waiting_for
        return answer.assignment

    def upload(self, key: str = ALICE, version: int = 0) -> Assignment:
        task = self.task(key, version)
        self.pool.assignments.uploaded(key, task.id, FILE)
        return task

    def claim(self, validator: str = VALIDATOR) -> Claim | None:
        claims = self.claims(validator, 1)
        return claims[0] if claims else None

    def claims(self, validator: str, limit: int) -> list[Claim]:
        return self.pool.judgement.claim(validator, limit).claims

    def draws(self, *numbers: float) -> None:
        """Replace the pool's random numbers."""
        drawn = iter(numbers)
        self.pool.trust.random = lambda: next(drawn)

    def judge(
        self,
        id: str,
        reason: Reason | None = None,
        useful: tuple[bool, ...] = (True, True),
        validator: str = VALIDATOR,
        *,
        confirmed: bool = True,
        replay: Replay | None = None,
        spent: ToleranceSpent | None = None,
    ) -> None:
        """Give a verdict. If it must be confirmed and `confirmed` is set, another validator gives the same verdict.

        If it accepts, the task gets as many groups as `useful`.
        """
        if reason is None:
            self.pool.db.connection.change("UPDATE submissions SET groups = ? WHERE id = ?", len(useful), id)
            self.pool.judgement.accepted_stored(validator, id, ACCEPTED_FILE)
        opinion = {"replay": replay, "spent": spent}
        self.pool.judgement.judge(validator, verdict(id, reason, useful, validator, **opinion))
        if confirmed and self.state(id) == "uploaded":
            second = OTHER_VALIDATOR if validator == VALIDATOR else VALIDATOR
            self.lease(id, second)
            self.pool.judgement.judge(second, verdict(id, reason, useful, second, **opinion))

    def lease(self, id: str, validator: str, *, full_check: bool = True) -> None:
        """Claim only this submission."""
        submission, lease_s = self.pool.db.submissions.get(id), self.clock.now_s + 50
        assert submission is not None
        columns = {"validator": validator, "lease_s": lease_s, "full_check": full_check}
        assert self.pool.db.submissions.move(submission, "claim", **columns)

    def status(self) -> Status:
        return read_status(self.pool.db, self.pool.config, self.pool.run, self.pool.notices)

    def metrics(self) -> str:
        return read_metrics(self.pool.db)

    def node(self, key: str = ALICE) -> Member:
        node = self.pool.db.nodes.get(key)
        assert node is not None
        return node

    def claimed(self) -> Claim:
        claim = self.claim()
        assert claim is not None
        return claim

    def end(self) -> None:
        """Report the last step as trained."""
        self.pool.learning.trained(StepReport(step=5, metrics={}, trained=[]))

    def state(self, id: str) -> str:
        submission = self.pool.db.submissions.get(id)
        assert submission is not None
        return submission.state

    def accepted(self, key: str = ALICE, version: int = 0, useful: tuple[bool, ...] = (True, True)) -> Assignment:
        """Upload one submission, and accept it."""
        task = self.upload(key, version)
        assert self.claimed().assignment.id == task.id
        self.judge(task.id, None, useful)
        return task

    def rejected(self, reason: Reason, key: str = ALICE) -> Assignment:
        task = self.upload(key)
        assert self.claimed().assignment.id == task.id
        self.judge(task.id, reason)
        return task

    def kinds(self) -> list[str]:
        return [entry.kind for entry in self.pool.db.ledger.entries()]


def payload(name: str, *, role: Any = "worker", nonce: str = "0" * 32, expires_s: int = 2_000) -> InvitePayload:
    return InvitePayload(run="r", role=role, name=name, nonce=nonce, expires_s=expires_s)


def strangers() -> InvitePayload:
    return payload("stranger").model_copy(update={"open": True})


def verdict(
    id: str,
    reason: Reason | None = None,
    useful: tuple[bool, ...] = (True, True),
    validator: str | Identity = VALIDATOR,
    *,
    run: str = "r",
    file: str = FILE,
    accepted: str = ACCEPTED_FILE,
    groups: list[GroupResult] | None = None,
    **opinion: Any,
) -> Verdict:
    """Return a signed verdict. `opinion`: further fields of the opinion."""
    groups = groups or [GroupResult(reward_mean=0.5, useful=u, tokens=10) for u in useful] if reason is None else []
    accepted = "" if reason else accepted
    tokens = sum(group.tokens for group in groups)
    signed = Opinion(
        run=run, submission=id, file=file, reason=reason, accepted=accepted, **{"tokens": tokens} | opinion
    )
    return Verdict(
        submission=id,
        opinion=sign_opinion(signed, SIGNERS[validator] if isinstance(validator, str) else validator).model_dump_json(),
        detail="the proof is of other weights" if reason is Reason.PROOF else "",
        evidence={},
        groups=groups,
    )


def config(
    *,
    validator: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    groups: int = 2,
    requirements: dict[str, Any] | None = None,
    in_flight: int = 1,
    **coordinator: Any,
) -> Config:
    """Return a config with batches of 4 groups, submissions of 2 groups, async level 2 and 6 steps."""
    return parse(
        {
            "run": run or {"steps": 6},
            "coordinator": {"prompts_per_step": 4} | coordinator,
            "workers": {"groups_per_submission": groups, "in_flight": in_flight},
            "sampling": {"max_tokens": 64},
            "learner": {"optimizer_steps_per_step": 1},
            "validator": validator or {},
            "requirements": requirements or {},
        }
    )


def sqlite(path: Path | str) -> Connection:
    return SqliteConnection(sqlite3.connect(path, isolation_level=None))


connect: Callable[[Path | str], Connection] = sqlite


def open_pool(path: Path | str = ":memory:", clock: Clock | None = None, **settings: Any) -> Harness:
    connection = connect(path)
    clock = clock or Clock()
    ledger = Ledger(connection, COORDINATOR, clock=clock)
    pool = Pool(connection, ledger, config(**settings), "r", clock, secret=b"secret")
    pool.checkers.random = lambda: 1.0  # no second opinion on accepted work
    return Harness(pool, clock)


def staffed_pool(
    *,
    workers: tuple[str, ...] = (ALICE, BOB),
    validators: tuple[str, ...] = (VALIDATOR, OTHER_VALIDATOR),
    **settings: Any,
) -> Harness:
    """Open a pool with these members and version 0."""
    harness = open_pool(**settings)
    for key in workers:
        harness.join(key)
    for key in validators:
        harness.join(key, "validator")
    harness.publish(0)
    return harness


def advance(harness: Harness, steps: int, version: int = 0) -> None:
    """Fill the batches of `steps` steps with rollouts of one version."""
    for _ in range(steps):
        harness.accepted(version=version)
        harness.accepted(version=version)


def metrics_of(text: str) -> dict[str, float]:
    """Parse Prometheus' text format: samples by name and labels."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples
