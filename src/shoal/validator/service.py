"""The validator: claims submissions, judges them, hands accepted files and verdicts back.

Called by `shoal validator`. Several may run: claims are leases, and what one drops another is given.
"""

import threading
from pathlib import Path

from shoal.config import Config
from shoal.model.dtype import DtypeName
from shoal.protocol.messages import Claim, ClaimRequest, Claims, ContentOwner, Ok, Stored, Verdict
from shoal.protocol.node import Node, RefusedError
from shoal.shardcast import Client
from shoal.shardcast.fetch.follow import fetch_published
from shoal.validator.case import Case, Finding
from shoal.validator.judge import Judge, group_results

IDLE_S = 0.1


class Validator:
    def __init__(self, node: Node, config: Config, cache: Path, publisher: str, dtype: DtypeName) -> None:
        self.node = node
        self.config = config
        self.cache = cache
        self.access = node.access(publisher, config)
        self.judge = Judge(config, node.invite.run, dtype)

    def run(self, stop: threading.Event) -> str:
        """Check submissions until the run ends or `stop`. Returns which."""
        with self.judge:
            while not stop.is_set():
                if self.node.answer and self.node.answer.state != "running":
                    return self.node.answer.state
                claims = self.node.post("/v1/claims", ClaimRequest(most=self.config.validator.batch), Claims).claims
                if not claims:
                    self.node.doing("submissions", waiting=True)
                    self.be_ready()
                    stop.wait(IDLE_S)
                    continue
                self.node.doing(f"checking {', '.join(claim.assignment.id for claim in claims)}")
                self.load(claims[0].assignment.policy_version, claims[0].assignment.policy_digest)
                for verdict, accepted in self.check(claims):
                    self.hand_in(verdict, accepted)
        return "stopped"

    def check(self, claims: list[Claim]) -> list[tuple[Verdict, bytes | None]]:
        """A verdict for each claim, with the accepted file where it is accepted. All are of the loaded version."""
        opened = [self.open(claim) for claim in claims]
        cases = [case for case in opened if isinstance(case, Case)]
        cheaply = [not claim.full for claim, case in zip(claims, opened, strict=True) if isinstance(case, Case)]
        found = iter(self.judge.examine(cases, cheaply=cheaply))
        return [
            self.conclude(claim, case, next(found)) if isinstance(case, Case) else (_verdict(claim, None, case), None)
            for claim, case in zip(claims, opened, strict=True)
        ]

    def open(self, claim: Claim) -> Case | Finding:
        """Fetch and read one submission."""
        data = self.node.get_bytes(f"/v1/submissions/{claim.assignment.id}")
        case = self.judge.open(claim.assignment, claim.worker, data)
        if isinstance(case, Case):
            case.content_owner = self.node.get(f"/v1/contents/{case.header.content}", ContentOwner).submission
        return case

    def conclude(self, claim: Claim, case: Case, finding: Finding | None) -> tuple[Verdict, bytes | None]:
        if finding is not None:
            return _verdict(claim, case, finding), None
        self.node.tokens += sum(len(row.tokens) for row in case.rows)
        groups = group_results(case, self.judge.tokenizer)
        verdict = _verdict(claim, case, None).model_copy(update={"groups": groups})
        return verdict, self.judge.accepted_file(case, self.node.identity)

    def hand_in(self, verdict: Verdict, accepted: bytes | None) -> None:
        """Hand in a verdict. A claim that was lost meanwhile is let go."""
        try:
            if accepted is not None:
                stored = self.node.put(f"/v1/accepted/{verdict.submission}", accepted, Stored)
                verdict = verdict.model_copy(update={"accepted_hash": stored.hash})
            self.node.post("/v1/verdicts", verdict, Ok)
        except RefusedError as refusal:
            if refusal.status != 409:
                raise
            self.node.doing(f"letting go of {verdict.submission}: {refusal}")

    def be_ready(self) -> None:
        """Hold some version before there is anything to check, so that the first submission does not wait for it."""
        answer = self.node.answer
        if self.node.policy_version is None and answer and answer.relays and answer.newest_version is not None:
            self.load(answer.newest_version)

    def load(self, version: int, digest: str | None = None) -> None:
        """Hold the weights of exactly this version."""
        if self.node.policy_version == version:
            return
        relays = self.node.beat().relays
        client = Client(relays, self.access, self.cache, keep=self.config.relays.keep)
        folder, _ = fetch_published(client, version, digest=digest)
        self.judge.load(folder)
        self.node.policy_version = version


def _verdict(claim: Claim, case: Case | None, finding: Finding | None) -> Verdict:
    return Verdict(
        submission=claim.assignment.id,
        reason=finding.reason if finding else None,
        detail=finding.detail[:2000] if finding else "",
        evidence=case.evidence if case else {},
        content=case.header.content if case else None,
    )
