"""The validator: claims a submission, checks it, hands the accepted file and the verdict back.

Invariant: it accepts nothing that it has not recomputed; the accepted file holds its own prompts, rewards and logprobs.
Called by `shoal validator`. Several may run: claims are leases. Left out: batching the prefill across submissions.
"""

import threading
from pathlib import Path
from typing import Any

import torch

from shoal import tasks
from shoal.config import Config
from shoal.messages import Claim, ContentOwner, GroupResult, Ok, Reason, Stored, Verdict
from shoal.model.dtype import DtypeName
from shoal.model.load import eos_ids, load_model, load_tokenizer, load_weights_
from shoal.node import Node, RefusedError
from shoal.shardcast import Client
from shoal.shardcast.follow import fetch_published
from shoal.store.quarantine import Quarantine
from shoal.store.rollouts import (
    SCHEMA_VERSION,
    AcceptedRollout,
    BadSignatureError,
    Header,
    RolloutFileError,
    read_submission,
    write_accepted,
)
from shoal.tasks.derive import plan_groups
from shoal.validator.checks import Case, Finding, examine

IDLE_S = 0.1


class Validator:
    def __init__(self, node: Node, config: Config, cache: Path, publisher: str, dtype: DtypeName) -> None:
        self.node = node
        self.config = config
        self.cache = cache
        self.publisher = publisher
        self.dtype = dtype
        self.tasks = tasks.load(config.tasks)
        max_rows = config.workers.groups_per_submission * config.sampling.group_size
        self.quarantine = Quarantine(max_rows, config.sampling.max_tokens)
        self.model: Any = None
        self.tokenizer: Any = None
        self.eos_ids: tuple[int, ...] = ()

    def run(self, stop: threading.Event) -> str:
        """Check submissions until the run ends or `stop`. Returns which."""
        with self.quarantine:
            while not stop.is_set():
                if self.node.answer and self.node.answer.state != "running":
                    return self.node.answer.state
                claim = self.node.ask("/v1/claims", Claim)
                if claim is None:
                    self.node.doing("submissions", waiting=True)
                    stop.wait(IDLE_S)
                    continue
                self.node.doing(f"checking {claim.assignment.id}")
                self.judge(claim)
        return "stopped"

    def judge(self, claim: Claim) -> None:
        """Check one submission and hand in the verdict. A claim that was lost meanwhile is let go."""
        data = self.node.get_bytes(f"/v1/submissions/{claim.assignment.id}")
        verdict, accepted = self.check(claim, data)
        try:
            if accepted is not None:
                stored = self.node.put(f"/v1/accepted/{claim.assignment.id}", accepted, Stored)
                verdict = verdict.model_copy(update={"accepted_hash": stored.hash})
            self.node.post("/v1/verdicts", verdict, Ok)
        except RefusedError as refusal:
            if refusal.status != 409:
                raise
            self.node.doing(f"letting go of {claim.assignment.id}: {refusal}")

    def check(self, claim: Claim, data: bytes) -> tuple[Verdict, bytes | None]:
        """The verdict on a file, and the accepted file where it is accepted."""
        asked, size = claim.assignment, self.config.sampling.group_size
        try:
            self.quarantine.check(data)
            submission = read_submission(data, max_rows=asked.groups * size, max_tokens=self.config.sampling.max_tokens)
        except BadSignatureError as error:
            return _rejected(claim, Finding(Reason.SIGNATURE, str(error)), None), None
        except RolloutFileError as error:
            return _rejected(claim, Finding(Reason.UNREADABLE, str(error)), None), None
        self.load(asked.policy_version, asked.policy_digest)
        content = submission.header.content
        case = Case(
            config=self.config,
            run=self.node.invite.run,
            worker=claim.worker,
            assignment=asked,
            header=submission.header,
            rows=submission.rows,
            plans=plan_groups(
                run=self.node.invite.run,
                step=asked.step,
                policy_digest=asked.policy_digest,
                worker=claim.worker,
                submission=asked.number,
                groups=asked.groups,
                group_size=size,
                n_tasks=len(self.tasks.train),
                length_targets=self.config.tasks.length_targets,
            ),
            tasks=self.tasks,
            tokenizer=self.tokenizer,
            model=self.model,
            eos_ids=self.eos_ids,
            content_owner=self.node.get(f"/v1/contents/{content}", ContentOwner).submission,
        )
        finding = examine(case)
        if finding is not None:
            return _rejected(claim, finding, content, case.evidence), None
        self.node.tokens += sum(len(row.tokens) for row in case.rows)
        return _accepted(case, content), self._accepted_file(case)

    def load(self, version: int, digest: str) -> None:
        """Hold the weights of exactly this version."""
        if self.node.policy_version == version:
            return
        relays = self.node.beat().relays
        client = Client(
            relays, public_key=self.publisher, cache=self.cache, run=self.node.invite.run, keep=self.config.relays.keep
        )
        folder, _ = fetch_published(client, version, digest=digest)
        if self.model is None:
            self.model = load_model(folder, self.dtype, self.config.model.device)
            self.tokenizer, self.eos_ids = load_tokenizer(folder), eos_ids(folder)
        else:
            load_weights_(self.model, folder)
        self.node.policy_version = version

    def _accepted_file(self, case: Case) -> bytes:
        assert case.prefill is not None
        logprobs = torch.split(case.prefill.logprobs_N, case.prefill.lengths)
        rows = [
            AcceptedRollout(
                group=row.group,
                task=row.task,
                prompt=case.prompts[row.group],
                tokens=row.tokens,
                logprobs=logprobs[number].tolist(),
                reward=case.rewards[number],
            )
            for number, row in enumerate(case.rows)
        ]
        header = Header(
            schema_version=SCHEMA_VERSION,
            run=case.run,
            step=case.assignment.step,
            policy_version=case.assignment.policy_version,
            policy_digest=case.assignment.policy_digest,
            worker=case.worker,
            submission=case.assignment.number,
            signer=self.node.identity.public,
        )
        return write_accepted(header, rows, self.node.identity)


def _rejected(claim: Claim, finding: Finding, content: str | None, evidence: dict[str, float] | None = None) -> Verdict:
    return Verdict(
        submission=claim.assignment.id,
        reason=finding.reason,
        detail=finding.detail[:2000],
        evidence=evidence or {},
        content=content,
    )


def _accepted(case: Case, content: str) -> Verdict:
    assert case.prefill is not None
    rewards_GC = torch.tensor(case.rewards).view(-1, case.group_size)
    tokens_GC = torch.tensor(case.prefill.lengths).view(-1, case.group_size)
    groups = [
        GroupResult(
            reward_mean=float(rewards_C.mean()),
            useful=bool(rewards_C.max() - rewards_C.min() > 1e-6),
            tokens=int(tokens_C.sum()),
        )
        for rewards_C, tokens_C in zip(rewards_GC, tokens_GC, strict=True)
    ]
    return Verdict(
        submission=case.assignment.id, reason=None, detail="", evidence=case.evidence, content=content, groups=groups
    )
