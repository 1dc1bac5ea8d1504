"""Create the folder of a finished run. Coordinator, learner and origin run their real code, but there is no model.

The run has three steps of three groups. Files are real and signed, rollouts are made up, and weights are a few numbers.
One worker has one file rejected for a soft reason, and is slashed for another file.
"""

import json
import math
import shutil
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.trust.colluders import HONEST as SPENT
from benchmarks.trust.colluders import identity
from safetensors.torch import save_file

from shoal import config as config_module
from shoal.cli.audit.audit import audit
from shoal.config import Config, parse
from shoal.coordinator.database import config_text, record_start, seal
from shoal.coordinator.http.reports import read_status
from shoal.coordinator.http.serving import WorkLog
from shoal.coordinator.pool import TABLE_NAMES, Pool
from shoal.files import copy_tree, digests
from shoal.learner.groups import Gathering
from shoal.learner.report import sign_folder, signed_record
from shoal.ledger.chain import Head, sign_head, sign_opinion
from shoal.ledger.connection import open_sqlite
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Identity
from shoal.protocol.invite import run_id
from shoal.protocol.messages import (
    MILLION,
    Assignment,
    ClaimRequest,
    Evaluation,
    Fingerprint,
    GroupResult,
    Heartbeat,
    InvitePayload,
    Opinion,
    Outcomes,
    PolicyVersion,
    Reason,
    Sample,
    StepReport,
    Verdict,
)
from shoal.shardcast.origin import Origin
from shoal.store.folder import Folder
from shoal.store.rollouts import (
    SCHEMA_VERSION,
    AcceptedRollout,
    Header,
    Rollout,
    write_accepted,
    write_submission,
)
from shoal.tasks.compiling import build_tasks
from shoal.watch.record import RunRecord, RunState

STEPS, NEED, GROUPS, SIZE = 3, 3, 2, 2  # a batch needs NEED groups; a submission has GROUPS groups of SIZE rollouts

COORDINATOR, LEARNER, ORIGIN, VALIDATOR, ALICE, BOB, MALLORY, SECOND = map(identity, range(1, 9))
VALIDATORS = {"validator": VALIDATOR, "second": SECOND}
WORKERS = {"alice": ALICE, "bob": BOB, "mallory": MALLORY}
ROLES = {"learner": LEARNER, "origin": ORIGIN} | VALIDATORS | WORKERS
RUN = run_id("tampered", COORDINATOR.public)


def settings() -> Config:
    return parse(
        {
            "run": {"steps": STEPS},
            "tasks": {
                "prompt": "{question}=",
                "sources": [{"generator": "arithmetic", "options": {"operand_min": 1, "operand_max": 9}}],
                "heldout": 4,
            },
            "sampling": {"max_tokens": 6, "group_size": SIZE},
            "coordinator": {"prompts_per_step": NEED},
            "workers": {"groups_per_submission": GROUPS},
            "learner": {"optimizer_steps_per_step": 1},
            "evaluator": {"n": 4},
        }
    )


class Recorded:
    """A run in progress in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now_s = folder, 1_700_000_000.0
        self.coordinator = folder / "coordinator"
        self.config, _ = build_tasks(settings(), self.coordinator / "tasks")
        self.database = open_sqlite(self.coordinator / "pool.sqlite")
        ledger = Ledger(self.database, COORDINATOR, clock=self.clock)
        self.pool = Pool(self.database, ledger, self.config, RUN, self.clock, secret=b"secret")
        self.store = Folder(self.coordinator / "store")
        self.origin = Origin(folder / "origin" / "store", ORIGIN.private_key, run=RUN)
        self.pool.checkers.random = lambda: 1.0  # no second opinion on accepted work
        self.pool.db.nodes.timeout_s = math.inf
        record_start(self.pool.db, RUN, COORDINATOR.public, self.config)
        for name, key in ROLES.items():
            role: Any = "worker" if name in WORKERS else "validator" if name in VALIDATORS else name
            invite = InvitePayload(run=RUN, role=role, name=name, nonce=key.public[:32], expires_s=2_000_000_000)
            self.pool.members.register(key.public, invite, None)

    def clock(self) -> float:
        self.now_s += 0.25
        return self.now_s

    def beat(self, key: Identity, version: int, *, wants: bool = False) -> Assignment | None:
        print_ = Fingerprint(version=version, value=key.public)
        beat = Heartbeat(policy_version=version, wants_task=wants, fingerprint=print_)
        return self.pool.members.heartbeat(key.public, beat).assignment

    def publish(self, version: int) -> str:
        """Write and publish a version. Return the digest of its weights."""
        folder = self.folder / "learner" / "versions" / f"v{version:06d}"
        folder.mkdir(parents=True)
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(3_000, generator=generator).bfloat16()
        weights[: 10 * version] += 1
        save_file({"w": weights}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        manifest = self.origin.publish(folder, version)
        self.pool.learning.published(
            PolicyVersion(version=version, digest=manifest.digest, size_bytes=manifest.size_bytes)
        )
        return digest_of(folder / "model.safetensors")

    def submit(self, key: Identity, version: int, reason: Reason | None = None, *, prefilled: bool = True) -> None:
        """Assign, upload and judge one submission. `prefilled`: the flag in the accepted file."""
        task = self.beat(key, version, wants=True)
        assert task is not None
        header = Header(
            schema_version=SCHEMA_VERSION,
            run=RUN,
            step=task.step,
            policy_version=task.policy_version,
            policy_digest=task.policy_digest,
            worker=key.public,
            submission=task.number,
            nonce=task.nonce,
            groups=task.groups,
            signer=key.public,
        )
        rows = [
            Rollout(
                group=number // SIZE,
                target_length=0,
                seed=number,
                tokens=[int(key.public[:2], 16) + number, 7, task.number + 1],
                logprobs=[-0.5, -0.25, -0.125],
                proofs=[bytes(258)],
            )
            for number in range(task.groups * SIZE)
        ]
        data = write_submission(header, rows, key)
        file = self.store.put("submissions", data)
        self.pool.assignments.uploaded(key.public, task.id, file)
        stored, groups = "", []
        if reason is None:
            accepted = [
                AcceptedRollout(r.group, f"t{number}", [1, 2], r.tokens, r.logprobs, float(number % SIZE))
                for number, r in enumerate(rows)
            ]
            judged = header.model_copy(update={"prefilled": prefilled})
            stored = self.store.put("accepted", write_accepted(judged, accepted, VALIDATOR))
            groups = [group_result(number) for number in range(task.groups)]
        opinion = Opinion(run=RUN, submission=task.id, file=file, reason=reason, accepted=stored)
        if reason is None:
            opinion = opinion.model_copy(update={"spent": SPENT, "tokens": sum(group.tokens for group in groups)})
        for validator in (VALIDATOR, SECOND) if reason else (VALIDATOR,):
            [claim] = self.pool.judgement.claim(validator.public, ClaimRequest(most=1).most).claims
            assert claim.assignment.id == task.id
            if stored:
                self.pool.judgement.accepted_stored(validator.public, task.id, stored)
            signed = sign_opinion(opinion, validator).model_dump_json()
            verdict = Verdict(submission=task.id, opinion=signed, detail="", evidence={}, groups=groups)
            self.pool.judgement.judge(validator.public, verdict)

    def train(self, step: int, before: str) -> str:
        """Write the records of a trained step. Return the digest of the next weights."""
        batch = self.pool.batches.of_step(step)

        def read(id: str) -> bytes:
            return self.store.get("accepted", self.pool.judgement.hashes(id)[1])

        keys = {VALIDATOR.public}
        fetched = Gathering(read, run=RUN, config=self.config, quarantine=self.folder / "q").gather(batch, keys)
        after = self.publish(step + 1)
        node: Any = SimpleNamespace(invite=SimpleNamespace(run=RUN), identity=LEARNER)
        device, ranks = torch.device("cpu"), SimpleNamespace(size=1)
        policy: Any = SimpleNamespace(compute=torch.float32, ranks=ranks, device=device)
        record = signed_record(node, step, fetched, before, after, policy)
        checkpoint = self.folder / "learner" / "checkpoints" / f"step-{step + 1:06d}"
        checkpoint.mkdir(parents=True)
        save_file({"model.w": torch.arange(500.0) + step}, checkpoint / "shard-00001-model-00001-of-00001.safetensors")
        (checkpoint / "progress.json").write_text(json.dumps({"step": step + 1}))
        sign_folder(node, checkpoint, step + 1, digests(checkpoint))
        names = [group.submission for group in fetched.groups]
        self.pool.learning.trained(StepReport(step=step, metrics={"loss": 0.5 + step}, trained=names, record=record))
        return after

    def co_sign(self) -> None:
        entry = self.pool.db.ledger.head()
        assert entry is not None
        signed = sign_head(Head(run=RUN, seq=entry.seq, digest=entry.digest), VALIDATOR)
        self.pool.record_head(VALIDATOR.public, signed)
        path = self.folder / "validator" / "head.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(signed.model_dump_json())

    def finish(self) -> None:
        copy_tree(self.folder / "learner" / "versions" / f"v{STEPS:06d}", self.folder / "model")
        self.pool.learning.evaluated(Evaluation(version=STEPS, greedy=0.5, sampled=0.25, n=4, final=True))
        self.pool.judgement.checkers.fingerprints.request_renewal(BOB.public)
        (self.folder / "config.toml").write_text(config_module.dumps(self.config))
        record = RunRecord(self.folder, lambda line: None)
        record.add_history(self.pool.db.history.after(0))
        record.add_work(WorkLog(self.pool.db.connection, []).new())
        status = read_status(self.pool.db, self.config, RUN, [])
        record.write_state(RunState(status=status, config=config_text(self.config), under_way=[], ended=True))
        record.close()
        seal(self.pool.db, TABLE_NAMES)
        self.database.sqlite.close()
        self.origin.store.unlock()


def record_run(folder: Path) -> Path:
    """Record a finished and sealed run in a new folder. Return the folder."""
    run = Recorded(folder)
    weights = run.publish(0)
    run.submit(ALICE, 0)
    run.submit(MALLORY, 0)
    weights = run.train(0, weights)
    run.co_sign()
    run.submit(MALLORY, 1, Reason.BOUNDS)
    run.submit(ALICE, 1)
    weights = run.train(1, weights)
    run.submit(BOB, 2)
    run.submit(MALLORY, 2, Reason.PROOF)
    run.submit(BOB, 2)
    run.train(2, weights)
    run.co_sign()
    run.finish()
    return folder


def group_result(number: int) -> GroupResult:
    return GroupResult(
        task=number,
        source="arithmetic",
        reward_mean=0.5,
        score_millionths=MILLION,
        outcomes=Outcomes(graded=SIZE),
        useful=True,
        tokens=3 * SIZE,
        sample=Sample(task="1+1", prompt="1+1=", completion="2", reward=0.0, tokens=3),
    )


def digest_of(path: Path) -> str:
    from blake3 import blake3

    return blake3(path.read_bytes()).hexdigest()


def copy_of(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder))


def check(folder: Path) -> list[str]:
    """Return the report of an audit of the ledger and the files. Raise BrokenError."""
    lines: list[str] = []
    audit(folder, lines.append, Random(0), rerun=0, proofs=0)
    return lines
