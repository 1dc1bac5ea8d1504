"""The public data of a run, from the coordinator's open routes: state, history, and the offer to strangers.

    offer = find_run(url, client)      GET /v1/offer; the coordinator's signature is checked
    invite = open_invite(offer)        the open invite in that offer, checked like any other invite

Invariants: the history is fetched by cursor, so each update transfers only new entries. A step or evaluation that is
reported again replaces the earlier report. A request that the coordinator answers with 429 is repeated. The coordinator
signs an offer for this very request (`signing`), so nobody can replay an old offer. No answer can prove who owns the
coordinator's key, so ask the operator for the key, and pass it to `find_run` or compare it with the key in the offer.
"""

import time
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

import httpx
from pydantic import ValidationError

from shoal.config.sections import RequirementsSection
from shoal.errors import ShoalError
from shoal.protocol.calling import BodyError, get
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite, open_payload, server_url
from shoal.protocol.messages import (
    VERSION,
    AtLeast0,
    Capability,
    Count,
    Evaluation,
    MaybeHex64,
    Message,
    NodeName,
    NodeState,
    Number,
    Role,
    RunOffer,
    Sample,
    Stats,
    SubmissionId,
)
from shoal.protocol.signing import SignedAuth, UnsignedAnswerError, check_answer

MAX_SAMPLES = 512  # the newest are kept
BUSY = 429  # HTTP status
PAUSE_S, PATIENCE_S = 0.5, 30.0  # the pause between two attempts; the time limit of all attempts
AUDIENCE, OFFER_BYTES = "offer", 64 << 10  # the audience of a request for an offer; the largest offer
MAX_BYTES = 16 << 20  # the largest state or page of history
MAX_PAGES = 1000  # pages of history per `look`, because a malicious server could send new pages without end


class NodeStatus(Message):
    name: str
    role: Role
    url: str | None
    policy_version: Count | None
    seen_s: Number
    evicted: bool
    state: NodeState = "active"
    reason: str = ""  # why it is in this state
    suspended_s: AtLeast0 = 0  # time until it gets tasks again; 0: not suspended
    suspension: str = ""  # why it is suspended
    missed: Count = 0  # tasks that it never uploaded
    accepted: Count
    rejected: Count
    stats: Stats
    credited: Count = 0  # tokens of accepted work whose credit is final
    pending: Count = 0  # tokens of accepted work whose credit is in escrow
    evidence: Number = 0.0  # evidence that it cheats, in nats; at ln(1 / evidence.ALPHA) it is dismissed
    fingerprint: str = MaybeHex64  # the newest that it reported; "": it reported none and is in no exactness class
    size: Count = 0  # groups in its usual task; 0: as many as a newcomer gets
    capability: Capability = Capability()


class Exactness(Message):
    """Work that was replayed bit for bit."""

    submissions: Count = 0  # accepted submissions
    tokens: Count = 0  # sampled tokens in these submissions, all with equal argmax, logprob and proof
    mismatched_tokens: Count = 0  # in submissions that were rejected as `inexact`


class Signal(Message):
    """Whether accepted groups give a training signal. A group is useful if its rewards differ."""

    groups: Count = 0  # accepted since the current step began
    useful: Count = 0  # useful groups among these
    flat: Count = 0  # groups accepted since the last group whose rewards differ
    lowest: Number | None = None  # lowest mean reward of the groups that `flat` counts
    highest: Number | None = None  # highest mean reward of the groups that `flat` counts


class Grading(Message):
    """Grader errors among the newest accepted rollouts."""

    total: Count = 0  # rollouts accepted in the whole run
    recent: Count = 0  # number of the newest rollouts in which `errors` are counted
    errors: Count = 0


class Status(Message):
    run: str
    state: Literal["running", "finished"]
    step: Count  # the smallest step that lacks accepted rollouts
    steps: Count
    have: Count
    need: Count
    newest_version: Count | None
    started_s: Number
    now_s: Number
    nodes: list[NodeStatus]
    trained: Count  # number of trained steps
    notices: list[str]  # for the operator, newest last
    reject_reasons: dict[str, Count]
    slashed: list[str]  # names of workers; an evicted relay is not slashed
    stale_groups: Count  # useful groups that became too old before a batch took them
    late_groups: Count = 0  # groups in submissions that came too late for any batch
    useful_groups: Count = 0  # accepted so far, stale ones included
    tokens_generated: Count  # accepted tokens, counted by the validators
    signal: Signal = Signal()
    grading: Grading = Grading()
    exact: Exactness = Exactness()


class WorkerSample(Sample):
    """A sample, and who generated it."""

    submission: str = SubmissionId
    group: Count
    worker: str = NodeName
    policy_version: Count


class History(Message):
    """Entries after a cursor, oldest first. A step that the learner reports twice appears twice."""

    cursor: Count  # for the next request
    metrics: list[dict[str, float]]  # one per trained step
    evaluations: list[Evaluation]
    samples: list[WorkerSample]


@dataclass
class RunHistory:
    cursor: int = 0
    metrics: list[dict[str, float]] = field(default_factory=list)  # one per trained step, in order
    evaluations: list[Evaluation] = field(default_factory=list)  # by version, the final one last
    samples: list[WorkerSample] = field(default_factory=list)  # oldest first

    def add(self, news: History) -> bool:
        """Add an answer from the coordinator. Return whether it had new entries."""
        if news.cursor == self.cursor:
            return False
        self.cursor = news.cursor
        steps = {step["step"]: step for step in [*self.metrics, *news.metrics]}
        self.metrics = [steps[number] for number in sorted(steps)]
        evaluations = {(each.version, each.final): each for each in [*self.evaluations, *news.evaluations]}
        self.evaluations = [evaluations[key] for key in sorted(evaluations)]
        self.samples = [*self.samples, *news.samples][-MAX_SAMPLES:]
        return True


class UnreachableError(ShoalError):
    """No coordinator answered; the message names the address."""


class PoolWatch:
    """Reads a run's state and history from its coordinator."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self.url = url
        self.client = client
        self.history = RunHistory()

    def look(self) -> Status:
        """Return the current state, and update `history`. Raise UnreachableError."""
        try:
            status = Status.model_validate_json(self._get("/v1/status", {}))
            for _ in range(MAX_PAGES):
                if not self.history.add(self._news()):
                    break
            return status
        except httpx.TransportError as error:
            raise UnreachableError(
                f"no coordinator answers at {self.url} ({error or type(error).__name__}); is it running and reachable?"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, ValidationError) as error:
            raise UnreachableError(f"the server at {self.url} is not a Shoal coordinator of this version") from error

    def _news(self) -> History:
        return History.model_validate_json(self._get("/v1/history", {"after": self.history.cursor}))

    def _get(self, path: str, query: dict[str, int]) -> bytes:
        deadline_s = time.monotonic() + PATIENCE_S
        while (answer := get(self.client, f"{self.url}{path}", MAX_BYTES, params=query)).status_code == BUSY:
            if time.monotonic() > deadline_s:
                break
            time.sleep(PAUSE_S)
        return answer.raise_for_status().content


# --- the offer to strangers ----------------------------------------------------------------------------------------------


def find_run(url: str, client: httpx.Client, key: str = "") -> RunOffer:
    """Return the offer of the run at `url`. `key`: the coordinator's key, if known. Raise ShoalError, AddressError."""
    url = server_url(url)
    response = _request_offer(url, client)
    try:
        offer = RunOffer.model_validate_json(response.content)
        status, digest = response.status_code, sha256(response.content).digest()
        check_answer(key or offer.key, response.request, response.headers, status=status, body_sha256=digest)
        RequirementsSection.model_validate(offer.requirements)
    except UnsignedAnswerError as error:
        raise ShoalError(f"the offer of the run at {url} cannot be trusted: {error}") from error
    except ValidationError as error:
        raise ShoalError(f"the answer of {url}/v1/offer is not an offer of this version of Shoal") from error
    if offer.protocol != VERSION:
        raise ShoalError(
            f"{url} speaks protocol {offer.protocol}, but this machine speaks {VERSION}: install the same version"
        )
    return offer


def open_invite(offer: RunOffer) -> Invite:
    """Return the open invite in an offer. Raise ShoalError; InviteError if its signature is not the run's."""
    if not offer.invite:
        raise ShoalError(f"{offer.run} takes only workers with an invite; ask its operator for one")
    invite = Invite.decode(offer.invite)
    if (invite.key, invite.run) != (offer.key, offer.run):
        raise ShoalError(f"the invite that {offer.run} offers is for another run; tell its operator")
    invite.check("worker", None)
    if not open_payload(invite.signed.model_dump_json(), invite.key, invite.run).open:
        raise ShoalError(f"the invite that {offer.run} offers is for one node only; tell its operator")
    return invite


def _request_offer(url: str, client: httpx.Client) -> httpx.Response:
    """Request the offer. Sign the request with a new key, so that no answer to another request matches."""
    try:
        response = get(client, f"{url}/v1/offer", OFFER_BYTES, auth=SignedAuth(Identity.generate(), AUDIENCE))
    except BodyError as error:
        raise ShoalError(f"cannot read the offer of the run at {url}: {error}; tell its operator") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ShoalError(
            f"nothing answers at {url} ({error or type(error).__name__}); is the URL right and reachable?"
        ) from error
    if response.status_code != 200:
        raise ShoalError(
            f"{url}/v1/offer answers {response.status_code}: it is not a Shoal coordinator of this version"
        )
    return response
