"""The validator claims submissions, judges them, uploads accepted files and verdicts, and co-signs the ledger.

Invariant: before a rejection that rests on a prefill, the prefill is repeated with weights that are verified and loaded
again, because a flipped bit in this machine's memory or on its disk would look like a lie.
Several validators may run. A claim is a lease, so another validator can get the submission when the lease expires.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import ValidationError

from shoal.config import Config
from shoal.files import write_file
from shoal.ledger.chain import GENESIS, Entry, Head, LedgerError, open_head, parse_entries, sign_head, verify_chain
from shoal.model.dtype import DtypeName
from shoal.model.turns import model_tokens
from shoal.protocol.calling import RefusedError
from shoal.protocol.identity import Signed
from shoal.protocol.messages import (
    LEASE_S,
    Claim,
    ClaimRequest,
    Claims,
    Fingerprint,
    Ok,
    Opinion,
    Reason,
)
from shoal.protocol.node import Node
from shoal.shardcast import Client, Manifest
from shoal.shardcast.fetch.cache import Cache, forget_verified
from shoal.shardcast.fetch.client import fetch_published
from shoal.tasks import TaskSet
from shoal.validator.case import Case, Finding
from shoal.validator.checks import computed_fault, replay
from shoal.validator.judge import LATE, Examined, Judge
from shoal.validator.spending import regenerate, spent
from shoal.validator.verdict import Result, group_results

IDLE_S = 0.1
BATCH = 4  # largest number of submissions checked in one prefill; all are of one version
RELOAD_SHARE = 0.05  # largest share of time for reloads after inexact work, so that such work cannot block other claims
GRADING_SHARE = 0.5  # largest share of a lease for running the programs of all claims
# These reasons come from checks that run after those of the prefill.
GRADED_REASONS = (Reason.ENVIRONMENT, Reason.UNREPEATABLE)
HEAD = "head.json"
WITNESS_S = 30.0  # time between two co-signatures
MAX_PAGE_BYTES = 64 << 20  # largest page of the ledger: one entry may be as large as a verdict

log = logging.getLogger(__name__)


class Witness:
    """Reads the ledger and co-signs its newest entry every WITNESS_S.

    Each co-signed head extends the previous one. This holds across restarts, because `head.json` keeps the newest head.
    If the coordinator's ledger lacks that head, it was truncated or rewritten, so the validator exits.
    """

    def __init__(self, node: Node, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.node, self.path, self.clock = node, folder / HEAD, clock
        self._due_s = clock() + WITNESS_S

    def sign_if_due(self) -> None:
        if self.clock() >= self._due_s:
            self.sign()

    def sign(self) -> None:
        """Co-sign the newest entry, unless all new entries are co-signatures. Raise LedgerError."""
        self._due_s = self.clock() + WITNESS_S
        before = self._last_head()
        seq, digest = (before.seq, before.digest) if before else (0, GENESIS)
        if before is not None:
            page = self._page(seq - 1)
            if not page or (page[0].seq, page[0].digest) != (seq, digest):
                raise LedgerError(
                    f"the coordinator's ledger no longer holds {before}, which this validator co-signed", seq
                )
        newest, is_new = None, False
        while page := self._page(seq):
            verify_chain(page, self.node.invite.key, after=(seq, digest))
            newest, seq, digest = page[-1], page[-1].seq, page[-1].digest
            is_new = is_new or any(entry.kind != "witnessed" for entry in page)
        if newest is None or not is_new:
            return
        head = Head(run=self.node.invite.run, seq=newest.seq, digest=newest.digest)
        signed = sign_head(head, self.node.identity)
        write_file(self.path, signed.model_dump_json().encode())
        self.node.post("/v1/heads", signed, Ok)
        log.info("ledger head %s is co-signed", head)

    def _last_head(self) -> Head | None:
        if not self.path.exists():
            return None
        try:
            return open_head(Signed.model_validate_json(self.path.read_bytes()), self.node.identity.public)
        except ValidationError as error:
            raise LedgerError(f"{self.path} is damaged; remove it to read the ledger from its beginning") from error

    def _page(self, after: int) -> list[Entry]:
        data = self.node.get_bytes(f"/v1/ledger/{after}", max_bytes=MAX_PAGE_BYTES)
        return list(parse_entries(data.splitlines(), f"the coordinator's ledger after entry {after}"))


class Validator:
    def __init__(
        self,
        node: Node,
        config: Config,
        cache: Path,
        publisher: str,
        dtype: DtypeName,
        task_set: TaskSet | None = None,
        fingerprint: Callable[[Any], str] = lambda model: "",
        witness: Witness | None = None,
    ) -> None:
        """`fingerprint`: returns a loaded model's fingerprint, or "" if this machine's arithmetic depends on batch
        shapes.

        `witness`: co-signs the ledger. If it is None, this validator co-signs nothing.
        """
        self.node = node
        self.config = config
        self.cache = cache
        self.access = node.access(publisher, config)
        self.judge = Judge(config, node.invite.run, dtype, task_set, grading_s=LEASE_S * GRADING_SHARE)
        self.fingerprint = fingerprint
        self.witness = witness
        self.loaded: tuple[Path, Manifest] | None = None  # the version in memory: its files
        self.reload_at_s = 0.0  # monotonic time before which inexact work causes no reload

    def run(self, stop: threading.Event) -> str:
        """Check submissions until the run ends or `stop` is set. Return the reason to stop."""
        with self.judge:
            while not stop.is_set():
                if self.node.answer and self.node.answer.state != "running":
                    self.co_sign(last=True)
                    return self.node.answer.state
                self.co_sign()
                self.renew()
                claims = self.claim()
                if not claims:
                    self.preload()
                    stop.wait(self.node.pause_s(IDLE_S))
                    continue
                self.load(claims[0].assignment.policy_version, claims[0].assignment.policy_digest)
                for result in self.check(claims):
                    self.upload(result)
        return "stopped"

    def renew(self) -> None:
        """Load the weights again if the coordinator asks for a new fingerprint."""
        if (request := self.node.renewal()) is not None:
            self.reload()
            self.node.renewals = request

    def claim(self) -> list[Claim]:
        """Lease up to BATCH submissions, all of one version."""
        claims = self.node.post("/v1/claims", ClaimRequest(most=BATCH), Claims).claims
        if claims:
            self.node.doing(f"checking {', '.join(claim.assignment.id for claim in claims)}")
        else:
            self.node.doing("submissions", waiting=True)
        return claims

    def check(self, claims: list[Claim]) -> list[Result]:
        """Return each claim's result. All claims must be of the loaded version.

        Leave out claims whose file the coordinator has lost.
        """
        opened = [(claim, *pair) for claim in claims if (pair := self.open(claim)) is not None]
        pairs = [(claim, case) for claim, _, case in opened if isinstance(case, Case)]
        examined = iter(self.examine([case for _, case in pairs], [claim for claim, _ in pairs]))
        return [
            self.conclude(claim, file, next(examined) if isinstance(case, Case) else case)
            for claim, file, case in opened
        ]

    def examine(self, cases: Sequence[Case], claims: Sequence[Claim]) -> list[Examined]:
        """Run the checks. If a prefill leads to a rejection, reload the weights and repeat the prefill.

        A worker can cause `inexact` rejections cheaply. So if all rejections are `inexact`, spend at most
        RELOAD_SHARE of the time on reloads.
        """
        examined = self.judge.examine(self._by_class(cases, claims), cheaply=[not claim.full for claim in claims])
        doubtful = [n for n, result in enumerate(examined) if _rests_on_prefill(result)]
        if not doubtful:
            return examined
        inexact = {finding.reason for n in doubtful if (finding := examined[n].finding)} == {Reason.INEXACT}
        if (start_s := time.monotonic()) >= self.reload_at_s or not inexact:
            self.reload()
            self.reload_at_s = start_s + (time.monotonic() - start_s) / RELOAD_SHARE
        again = self.judge.examine(self._by_class([cases[n] for n in doubtful], [claims[n] for n in doubtful]))
        for n, result in zip(doubtful, again, strict=True):
            if result.finding is None:
                log.warning(
                    "%s: %s, but it passed after the weights were reloaded: this machine's memory or arithmetic is faulty",
                    claims[n].assignment.id,
                    examined[n].finding,
                )
            examined[n] = result
        return examined

    def _by_class(self, cases: Sequence[Case], claims: Sequence[Claim]) -> list[Case]:
        """Mark as `exact` all cases if the config says so, else those whose workers claim this validator's class."""
        own = self.node.fingerprint.value if self.node.fingerprint else ""
        always = self.config.validator.classes == "exact"
        return [
            replace(case, exact=always or (own != "" and claim.fingerprint == own))
            for case, claim in zip(cases, claims, strict=True)
        ]

    def open(self, claim: Claim) -> tuple[str, Case | Finding] | None:
        """Fetch and read one submission; return its file's hash too, or None if the coordinator's file is damaged."""
        limit = self.config.max_submission_bytes
        try:
            data = self.node.fetch_file(f"/v1/submissions/{claim.assignment.id}", max_bytes=limit)
        except RefusedError as error:
            if error.status != 410:
                raise
            log.error("%s cannot be checked: %s", claim.assignment.id, error)
            return None
        return blake3(data).hexdigest(), self.judge.open(claim.assignment, claim.worker, data)

    def conclude(self, claim: Claim, file: str, outcome: Examined | Finding) -> Result:
        """Return the result for a file with this hash."""
        opinion = Opinion(run=self.node.invite.run, submission=claim.assignment.id, file=file, reason=None)
        if isinstance(outcome, Finding):
            return Result(opinion.model_copy(update={"reason": outcome.reason}), outcome.detail)
        case, finding = outcome.case, outcome.finding
        if case.exact and case.prefill:
            opinion = opinion.model_copy(update={"replay": replay(case)})
        if finding is not None:
            return Result(opinion.model_copy(update={"reason": finding.reason}), finding.detail, outcome.evidence)
        self.node.tokens += sum(model_tokens(row.turns, len(row.tokens)) for row in case.rows)
        groups = group_results(case, self.judge.tokenizer)
        by_tolerances = case.prefill is not None and opinion.replay is None and LATE not in case.grades
        used = spent(case, self.config, outcome.evidence) if by_tolerances else None
        if used is not None and self.config.evidence.regenerated:
            improved, spoiled = regenerate(self.judge, case, self.config.evidence.regenerated)
            used = used.model_copy(update={"improved": improved, "spoiled": spoiled})
        opinion = opinion.model_copy(update={"spent": used, "tokens": sum(group.tokens for group in groups)})
        accepted = self.judge.accepted_file(case, self.node.identity)
        return Result(opinion, "", outcome.evidence, groups, accepted)

    def upload(self, result: Result) -> None:
        """Upload the accepted file, if any, then the verdict. Drop the verdict if this node has lost the claim."""
        id, reason, stored = result.opinion.submission, result.reason, ""
        try:
            if result.accepted is not None:
                stored = self.node.send_file(f"/v1/accepted/{id}", result.accepted).hash
            self.node.post("/v1/verdicts", result.verdict(self.node.identity, stored), Ok)
            log.info("submission %s: %s", id, f"rejected ({reason}): {result.detail!r}" if reason else "accepted")
        except RefusedError as refusal:
            if refusal.status != 409:
                raise
            self.node.doing(f"dropping the verdict on {id}: {refusal}")

    def co_sign(self, *, last: bool = False) -> None:
        """Co-sign the ledger's newest entry if a co-signature is due. `last`: co-sign even if none is due."""
        if self.witness is not None:
            self.witness.sign() if last else self.witness.sign_if_due()

    def preload(self) -> None:
        """Load the newest version before the first claim, so that the first submission does not wait for it."""
        answer = self.node.answer
        if not answer or not answer.relays or answer.newest_version is None:
            return
        # With validator.classes = "exact", a worker gets tasks only after a validator has reported the same fingerprint.
        exact = self.config.validator.classes == "exact" and answer.newest_version != self.node.policy_version
        if self.node.policy_version is None or exact:
            self.load(answer.newest_version)

    def load(self, version: int, digest: str | None = None) -> None:
        """Load the weights of exactly this version."""
        if self.node.policy_version != version:
            self._load(*self.fetch(version, digest))
            log.info("version %d is loaded", version)

    def reload(self) -> None:
        """Verify the files of the loaded version again, load them, and compute a new fingerprint."""
        if self.loaded is None:
            return
        folder, manifest = self.loaded
        forget_verified(folder)
        held = self._cache().held(manifest.version, manifest.digest)  # None if a file is damaged
        self._load(*(held or self.fetch(manifest.version, manifest.digest)))

    def fetch(self, version: int, digest: str | None) -> tuple[Path, Manifest]:
        """Fetch a version, and return its verified files. Raise FetchError."""
        relays = self.node.beat().relays
        trainable = self.config.coordinator.async_level + 1  # number of versions whose rollouts may still be trained on
        client = Client(relays, self.access, self.cache, keep=trainable + 1)
        return fetch_published(client, version, digest=digest)

    def _cache(self) -> Cache:
        return Cache(self.cache, public_key=self.access.public_key, run=self.access.run, keep=1)

    def _load(self, folder: Path, manifest: Manifest) -> None:
        self.loaded = folder, manifest
        self.judge.load(folder)
        self.node.policy_version = manifest.version
        self._take_fingerprint(manifest.version)

    def _take_fingerprint(self, version: int) -> None:
        value = self.fingerprint(self.judge.model)
        self.node.fingerprint = Fingerprint(version=version, value=value) if value else None


def _rests_on_prefill(result: Examined) -> bool:
    finding, prefill = result.finding, result.case.prefill
    if finding is None or prefill is None:
        return False
    return finding.reason not in GRADED_REASONS or computed_fault(prefill) != ""
