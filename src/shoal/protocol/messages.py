"""Every message between members of a pool. Public data of a run is in `history`; rollout files are in `store/`.

Invariant: models are strict, so unknown fields, wrong types and out-of-range numbers are refused.
This module imports nothing else of Shoal.

    sender        route                                 request -> answer
    anyone        GET  /v1/offer                        -> RunOffer (the client checks its signature)
    anyone        GET  /v1/run                          -> Signed[RunDescriptor], as workers may see it
    grading node  GET  /v1/config                       -> Signed[RunDescriptor], with the whole config
    new node      POST /v1/register                     Registration -> Registered
    operator      POST /v1/bookings                     Booking -> Ok (stakes, where no chain keeps them)
    every node    POST /v1/heartbeat                    Heartbeat -> HeartbeatAnswer (with a worker's next task)
    worker        POST /v1/drain                        -> Ok (no new tasks; the worker leaves after its last task)
    every node    GET  /v1/tasks/{sha256}               -> a manifest of tasks, or a file that it names: without answers
                                                           and rewards, unless the node grades
    worker        PUT  /v1/submissions/{id}             Parquet -> Stored
    validator     POST /v1/claims                       ClaimRequest -> Claims (all of one policy version; empty: wait)
    validator     GET  /v1/submissions/{id}             -> Parquet
    validator     PUT  /v1/accepted/{id}                Parquet -> Stored
    validator     POST /v1/verdicts                     Verdict -> Ok
    origin        POST /v1/policies                     PolicyVersion -> Ok
    validator     GET  /v1/ledger/{after}               -> the ledger's entries after this number, as JSON lines
    validator     POST /v1/heads                        Signed[Head] -> Ok (a co-signed entry of the ledger)
    learner       GET  /v1/batches/{step}               -> Batch
    learner       GET  /v1/accepted/{id}                -> Parquet
    learner       POST /v1/steps                        StepReport -> Ok
    evaluator     POST /v1/evaluations                  Evaluation -> Ok
    anyone        GET  /v1/status                       -> Status, in `history`
    anyone        GET  /v1/history?after=CURSOR         -> History, in `history` (metrics, evaluations)
    anyone        GET  /metrics                         -> the pool's metrics, in Prometheus' text format
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# --- fields ----------------------------------------------------------------------------------------------------------

LEASE_S = 300.0  # a validator's time from a claim to its verdict
LARGEST = 2**53 - 1  # largest integer that every JSON reader and SQLite represent exactly
MAX_SENDERS = 64  # senders of one version that a node reports
MAX_KEPT = 4  # older versions that origin and relays keep for validators
MAX_IN_FLIGHT = 16  # submissions that a worker generates at once (`workers.in_flight`)
VERSION = 5  # of this protocol; each side refuses a peer with another version

Role = Literal["learner", "origin", "relay", "worker", "validator", "evaluator"]
GRADING: tuple[Role, ...] = ("validator", "evaluator")  # these nodes get answers and rewards; others get prompts
NodeState = Literal["active", "suspended", "draining", "left", "dismissed", "banned"]  # coordinator/nodes
Hex64 = Field(pattern=r"^[0-9a-f]{64}$")
Hex32 = Field(pattern=r"^[0-9a-f]{32}$")
RunId = Field(pattern=r"^[\x20-\x7e]{1,120}$")  # also the audience of signatures
NodeName = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")
MaybeHex64 = Field(default="", pattern=r"^([0-9a-f]{64})?$")
SubmissionId = Field(pattern=r"^[0-9a-f]{16}-[0-9]{6}$")
SourceName = Field(default="", max_length=60)
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Number = Annotated[float, Field(ge=-1e12, le=1e12)]
AtLeast0 = Annotated[float, Field(ge=0, le=1e12)]
Accuracy = Annotated[float, Field(ge=0, le=1)]
MILLION = 1_000_000  # scores are summed in whole millionths, so sums are exact and equal everywhere
MAX_ROLLOUTS = 1 << 16  # in one group
Url = Field(max_length=200, pattern=r"^https?://[A-Za-z0-9._:\[\]-]+/?$")  # of a server: no path, query or user


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# --- joining ---------------------------------------------------------------------------------------------------------


class InvitePayload(Message):
    """The signed part of an invite: who may join, in which role, until when. It is valid once, unless it is open."""

    run: str = RunId
    role: Role
    name: str = NodeName
    nonce: str = Field(pattern=r"^[0-9a-f]{32}$")
    expires_s: Count
    open: bool = False  # for any number of workers with enough stake, each named by `name` and the start of its key

    @model_validator(mode="after")
    def _consistent(self) -> "InvitePayload":
        if self.open and self.role != "worker":
            raise ValueError(f"an open invite is for workers, not for the role {self.role}")
        return self


class RunDescriptor(Message):
    """The resolved config, and the keys whose signatures are valid."""

    protocol: Count
    run: str = RunId
    config: dict[str, Any]
    keys: dict[Role, list[str]]  # registered keys of all roles except workers


class RunOffer(Message):
    """A run's public offer to machines that look for a run: its requirements for workers, and how to join."""

    protocol: Count
    run: str = RunId  # the run's id, which is the audience of all its signatures
    key: str = Hex64  # the coordinator's key, which signs the answer
    model: str = Field(max_length=200)
    state: Literal["running", "finished"]
    step: Count
    steps: Count
    workers: Count  # live workers with enough stake
    places_free: Count | None  # None: no limit
    requirements: dict[str, Any]  # `[requirements]` of the run's config
    invite: str = Field(default="", max_length=4_000)  # for any worker with stake; "": there is none


class Capability(Message):
    """A machine's description of itself when it joins. A false description can only exclude its sender."""

    device: str = Field(default="", max_length=40, pattern="^[ -~]*$")  # cpu, cuda
    engine: str = Field(default="", max_length=40, pattern="^[ -~]*$")


class Registration(Message):
    invite: str = Field(max_length=2_000)  # the Signed InvitePayload, as JSON
    url: Annotated[str, Url] | None = None  # where an origin or relay serves
    capability: Capability | None = None
    protocol: Count  # VERSION of the sender
    payer: str = Field(default="", pattern="^(0x[0-9a-fA-F]{40})?$")  # the on-chain account that stakes for this key


class Booking(Message):
    """A stake that the operator received or pays back, where no chain keeps stakes."""

    kind: Literal["stake", "unstake", "withdraw"]
    key: str = Hex64
    amount: int = Field(default=0, ge=0, lt=1 << 62)


class Registered(Message):
    name: str
    role: Role


# --- heartbeats, tasks, uploads --------------------------------------------------------------------------------------


class Intake(Message):
    """A node's newest download of weights."""

    # download rates by the sender's URL
    bytes_per_s: dict[Annotated[str, Field(max_length=200)], AtLeast0] = Field(default={}, max_length=MAX_SENDERS)
    behind_s: AtLeast0 | None = None  # from the weights' publication until they were complete here
    version: Count | None = None
    size_bytes: Count = 0  # transferred
    took_s: AtLeast0 = 0
    ago_s: AtLeast0 = 0  # since the weights were complete


class Stats(Message):
    """A node's report about itself. It is used for display only."""

    doing: str = Field(default="", max_length=80)
    tokens: Count = 0  # generated or checked since it started
    busy_s: AtLeast0 = 0
    waiting_s: AtLeast0 = 0
    waiting: bool = False  # if so, `doing` names what the node waits for
    rss_bytes: Count = 0  # peak
    pid: Count = 0
    intake: Intake = Intake()


class Fingerprint(Message):
    """Digest of a node's results for one version on fixed inputs (`engine/selftest`).

    Nodes with equal digests are in one exactness class.
    """

    version: Count
    value: str = Hex64


class Finished(Message):
    """A submission that a worker is uploading. A different file for it will be refused."""

    submission: str = SubmissionId
    hash: str = Hex64  # BLAKE3 of the file


class Heartbeat(Message):
    policy_version: Count | None = None  # the version that the node has loaded or serves
    wants_task: bool = False
    working_on: list[Annotated[str, SubmissionId]] = Field(default=[], max_length=MAX_IN_FLIGHT)  # being generated
    stats: Stats = Stats()
    fingerprint: Fingerprint | None = None  # None: it computes nothing, or its arithmetic depends on batch shapes
    renewals: Count = 0  # number of reload requests from the coordinator that the node has completed
    refused: str = Field(default="", max_length=200)  # the version that it does not load, and why; shown to the learner
    finished: Finished | None = None  # a worker with accepted work gets its next task while it uploads this submission


class Assignment(Message):
    """A request for one submission, and permission to upload it. `tasks.derive` derives the tasks from it."""

    id: str = SubmissionId
    number: Count
    step: Count
    policy_version: Count
    policy_digest: str = Hex64
    nonce: str = Hex32  # only the coordinator can compute it; the same assignment always gets the same nonce
    groups: int = Field(ge=1, le=LARGEST)
    upload_path: str


class HeartbeatAnswer(Message):
    state: Literal["running", "finished", "evicted", "left"]  # left: it drained and has no tasks
    newest_version: Count | None
    relays: list[Annotated[str, Url]]
    assignment: Assignment | None = None
    waiting_for: str = ""  # why there is no assignment
    reader_grant: str = ""  # a short-lived permission to read from relays and the origin; "" if the node is evicted
    banned: list[str] = []  # keys that get no weights any more; for origin and relays only
    # older versions to keep, because validators still judge work of them; for origin and relays only
    keep: list[Annotated[int, Field(ge=0, le=LARGEST)]] = Field(default=[], max_length=MAX_KEPT)
    renewals: Count = 0  # number of requests to this node to reload its weights and report a new fingerprint
    refused: list[str] = []  # what nodes refused to load, and why; for the learner only


class Announced(Message):
    """A file that a node is about to send, or has sent, to the pool's bucket."""

    size_bytes: int = Field(ge=1, le=LARGEST)
    sha256: str = Hex64


class UploadGrant(Message):
    """Where to PUT a file, with exactly these headers."""

    url: str
    headers: dict[str, str]


class FileLink(Message):
    """Where to GET a file in the pool's bucket, and its BLAKE3."""

    url: str
    hash: str = Hex64


class Stored(Message):
    size_bytes: Count
    hash: str = Hex64


class Ok(Message):
    ok: bool = True


# --- versions, batches, steps, evaluations ---------------------------------------------------------------------------


class PolicyVersion(Message):
    version: Count
    digest: str = Hex64
    size_bytes: Count


class BatchGroup(Message):
    submission: str = SubmissionId
    group: Count


class Batch(Message):
    step: Count
    ready: bool
    groups: list[BatchGroup] = []


class Computed(Message):
    """Properties of a learner's computation. Two computations give equal bits only if all of these are equal."""

    dtype: Literal["float32", "bfloat16"]
    threads: int = Field(ge=1, le=1024)  # an audit starts as many
    ranks: Count
    torch: str = Field(max_length=60)
    machine: str = Field(max_length=200)  # architecture, instruction set, model of the CPU or GPU


class StepRecord(Message):
    """A step's inputs and result. The learner signs it, and the ledger keeps it."""

    run: str = RunId
    step: Count
    groups: list[BatchGroup]  # in the order of training
    files: dict[str, Annotated[str, Hex64]]  # digest of the rows of each accepted file, by submission
    before: str = Hex64  # BLAKE3 of the weights' file of version `step`
    after: str = Hex64  # BLAKE3 of the weights' file of version `step + 1`
    computed: Computed


class CheckpointRecord(Message):
    """The files of the learner's state before `step`. The checkpoint's folder holds the signed record."""

    run: str = RunId
    step: Count
    files: dict[str, Annotated[str, Hex64]]  # BLAKE3 by name


class StepReport(Message):
    """The learner's report on one step."""

    step: Count
    metrics: dict[str, float]
    trained: list[str]  # submission ids
    record: str = ""  # a StepRecord, signed by the learner, as JSON


class Evaluation(Message):
    version: Count
    greedy: Accuracy | None
    sampled: Accuracy | None
    n: int = Field(ge=1, le=LARGEST)
    final: bool


# --- claims and verdicts ---------------------------------------------------------------------------------------------


class Reason(StrEnum):
    """Why a submission was rejected: one word per lie. A `HARD` reason that two validators sign slashes the worker."""

    UNREADABLE = "unreadable"  # not a rollout file, or beyond its size limits
    SIGNATURE = "signature"  # not signed by the worker that has the task, or the signature does not match the rows
    CONTEXT = "context"  # made for another assignment, or for other prompts
    TASKS = "tasks"  # the groups, targets or seeds are not the derived ones
    BOUNDS = "bounds"  # token ids, lengths or numbers are out of range
    ENVIRONMENT = "environment"  # an environment's answer is false or missing
    UNREPEATABLE = "unrepeatable"  # an environment's answer differs here, or nothing finite can be computed here
    PROOF = "proof"  # the TOPLOC proof is not that of the claimed version's hidden states
    LOGPROBS = "logprobs"  # the logprobs are not those of the claimed version
    SAMPLING = "sampling"  # tokens differ from those that the seeds yield
    TERMINATION = "termination"  # a completion stopped early
    DISTRIBUTION = "distribution"  # tokens are too likely, or too unlikely, to be samples at the configured temperature
    SPECIAL_TOKENS = "special_tokens"  # a token is one that only chat templates use, and its seed does not yield it
    INEXACT = "inexact"  # within the limits, but not bit-identical, although the worker claims the same exactness class
    SPENDING = "spending"  # each submission is within the limits, but all together deviate more than honest numerics


# Soft reasons can be caused by a broken disk, a coordinator restored to an older state, an answer changed in transit, or
# a program that the model wrote. A hard reason follows from what the worker signed. It slashes the worker if two
# validators sign one (docs/trust.md).
SOFT = frozenset(
    {
        Reason.UNREADABLE,
        Reason.SIGNATURE,
        Reason.CONTEXT,
        Reason.BOUNDS,
        Reason.UNREPEATABLE,
        Reason.INEXACT,
        Reason.SPENDING,
    }
)
HARD = frozenset(Reason) - SOFT
# Soft reasons that depend on the file alone. `unrepeatable` is not among them, because its cause is a program that the
# model wrote.
UNUSABLE = frozenset({Reason.UNREADABLE, Reason.BOUNDS, Reason.SIGNATURE, Reason.CONTEXT})


class ClaimRequest(Message):
    most: int = Field(ge=1, le=16)


class Claim(Message):
    """A submission to check, leased to one validator until `lease_s` (unix time)."""

    assignment: Assignment
    worker: str = Hex64
    lease_s: Number
    full: bool = True  # False: a spot check suffices. This is drawn at random, more often for trusted workers
    fingerprint: str = MaybeHex64  # the worker's, for this version; "": it claims no exactness class


class Claims(Message):
    claims: list[Claim]


class Sample(Message):
    """One completion, for people to read. Long texts are cut in the middle."""

    task: str = Field(max_length=200)
    prompt: str = Field(max_length=4_000)
    completion: str = Field(max_length=4_000)
    reward: Number
    tokens: Count


class Outcomes(Message):
    """The outcomes of grading a group's completions."""

    graded: int = Field(default=0, ge=0, le=MAX_ROLLOUTS)
    wrong_format: int = Field(default=0, ge=0, le=MAX_ROLLOUTS)  # the completion contains no answer
    grader_error: int = Field(default=0, ge=0, le=MAX_ROLLOUTS)  # the grader failed

    @property
    def total(self) -> int:
        return self.graded + self.wrong_format + self.grader_error


PartName = Annotated[str, Field(min_length=1, max_length=200)]
MAX_PARTS = 1024


class GroupResult(Message):
    """One accepted group, as recomputed by the validator."""

    task: Count = 0  # index into the training tasks
    source: str = SourceName
    target_length: Count = 0  # tokens; 0: none
    reward_mean: Number
    score_millionths: int = Field(default=0, ge=0, le=MAX_ROLLOUTS * MILLION)  # summed over its completions
    outcomes: Outcomes = Outcomes()
    parts: dict[PartName, Number] = Field(default={}, max_length=MAX_PARTS)  # mean score of each of several rewards
    useful: bool  # rewards differ, so advantages are not all zero
    tokens: Count
    sample: Sample | None = None  # its first completion

    @model_validator(mode="after")
    def _consistent(self) -> "GroupResult":
        if self.score_millionths > self.outcomes.total * MILLION:
            raise ValueError("score_millionths exceeds a score of 1 per completion")
        return self


class Replay(Message):
    """The result of an exact replay."""

    tokens: Count  # sampled tokens that were compared
    mismatched: Count  # how many of these differed


LogEValue = Annotated[float, Field(ge=-1e6, le=1e6)]  # nats
BEYOND = (0.0, 1 / 8, 1 / 2, 1.0)  # margins, in units of `validator.sampling_margin`; tokens beyond each are counted


class ToleranceSpent(Message):
    """How much of the checks' tolerance one submission used. The coordinator sums this over a worker's submissions.

    Each LogEValue is evidence for the statement in its comment. An e-value has a mean of at most 1 for any honest worker
    (`shoal.evidence`).
    """

    exposure: AtLeast0  # sum over sampled tokens of 1 - P(token): how often numerics could have changed a token
    beyond: tuple[Count, Count, Count, Count]  # tokens whose margin exceeds each of BEYOND
    better: LogEValue  # differing tokens are in a group's better completions
    worse: LogEValue  # differing tokens are in a group's worse completions
    easier: LogEValue  # differing tokens are in groups of higher mean reward
    harder: LogEValue  # differing tokens are in groups of lower mean reward
    proof_exponent_mean: AtLeast0
    proof_mantissa_mean: AtLeast0
    logprob_error_mean: AtLeast0
    distribution: LogEValue  # tokens are too likely or too unlikely
    improved: Count = 0  # uploaded rollouts with a higher reward than the validator's own rollout of the same seed
    spoiled: Count = 0  # uploaded rollouts with a lower reward

    @model_validator(mode="after")
    def _consistent(self) -> "ToleranceSpent":
        if list(self.beyond) != sorted(self.beyond, reverse=True):
            raise ValueError("the counts in `beyond` must not grow with the margin")
        if not self.beyond[0] and any((self.better, self.worse, self.easier, self.harder)):
            raise ValueError("without a differing token there is no evidence about where differing tokens are")
        return self


class Opinion(Message):
    """What one validator says about one file of a worker. The validator signs it, and the ledger keeps it."""

    run: str = Field(max_length=200)
    submission: str = SubmissionId
    file: str = Hex64  # BLAKE3 of the worker's file
    reason: Reason | None  # None: it accepts the file
    accepted: str = MaybeHex64  # BLAKE3 of the accepted file; "" if it rejects the worker's
    tokens: Count = 0  # in the accepted file; what the worker is credited
    replay: Replay | None = None  # None: judged by tolerances, or without a prefill
    spent: ToleranceSpent | None = None  # for accepted submissions that were prefilled whole and judged by tolerances


class Verdict(Message):
    """A validator's signed opinion, and what it reports for people and for batches."""

    submission: str = SubmissionId
    opinion: str = Field(max_length=8_000)  # the signed Opinion, as JSON
    detail: str = Field(max_length=2_000)
    evidence: dict[str, float]
    groups: list[GroupResult] = []
