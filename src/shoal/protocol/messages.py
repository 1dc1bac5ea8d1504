"""Every message between members of a pool. What anyone may read of a run is in `history`; rollout files are in `store/`.

Invariant: models are strict: unknown fields, wrong types and out-of-range numbers are refused before anything is built.
Nothing else of Shoal is imported here.

    who asks      what                                  request -> answer
    anyone        GET  /v1/offer                        -> RunOffer (believed only if the answer is signed)
    anyone        GET  /v1/run                          -> Signed[RunDescriptor]
    new node      POST /v1/register                     Registration -> Registered
    operator      POST /v1/bookings                     Booking -> Ok (of stakes, where no chain keeps them)
    every node    POST /v1/heartbeat                    Heartbeat -> HeartbeatAnswer (a worker's task is in it)
    worker        POST /v1/drain                        -> Ok (it gets no new tasks, and leaves once it holds none)
    every node    GET  /v1/tasks/{sha256}               -> the task set's manifest, or a file that it names
    worker        PUT  /v1/submissions/{id}             Parquet -> Stored
    validator     POST /v1/claims                       ClaimRequest -> Claims (of one policy version; empty: wait)
    validator     GET  /v1/submissions/{id}             -> Parquet
    validator     GET  /v1/contents/{digest}            -> ContentOwner (the accepted submission with these rollouts)
    validator     PUT  /v1/accepted/{id}                Parquet -> Stored
    validator     POST /v1/verdicts                     Verdict -> Ok
    origin        POST /v1/policies                     PolicyVersion -> Ok
    every node    GET  /v1/ledger/{after}               -> the ledger's entries after this one, as JSON lines
    validator     POST /v1/heads                        Signed[Head] -> Ok (an entry that it saw, co-signed)
    learner       GET  /v1/batches/{step}               -> Batch
    learner       GET  /v1/accepted/{id}                -> Parquet
    learner       POST /v1/steps                        StepReport -> Ok
    evaluator     POST /v1/evaluations                  Evaluation -> Ok
    anyone        GET  /v1/status                       -> Status, in `history` (now)
    anyone        GET  /v1/history?after=CURSOR         -> History, likewise (metrics, evaluations, samples after it)
    anyone        GET  /metrics                         -> the pool's metrics, in Prometheus' text format
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# --- what messages are made of ---------------------------------------------------------------------------------------

LEASE_S = 300.0  # that a validator has for its verdict on what it claimed
LARGEST = 2**53 - 1  # integer that every JSON reader and SQLite represent exactly
MAX_SENDERS = 64  # of one version, in each node's report
MOST_IN_FLIGHT = 16  # submissions that a worker generates at once (`workers.in_flight`)
VERSION = 4  # of this protocol; each side refuses one that speaks another

Role = Literal["learner", "origin", "relay", "worker", "validator", "evaluator"]
NodeState = Literal["active", "suspended", "draining", "left", "dismissed", "banned"]  # coordinator/nodes
Hex64 = Field(pattern=r"^[0-9a-f]{64}$")
Hex32 = Field(pattern=r"^[0-9a-f]{32}$")
NodeName = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")
MaybeHex64 = Field(default="", pattern=r"^([0-9a-f]{64})?$")
SubmissionId = Field(pattern=r"^[0-9a-f]{16}-[0-9]{6}$")
SourceName = Field(default="", max_length=60)
Count = Annotated[int, Field(ge=0, le=LARGEST)]
MILLION = 1_000_000  # scores are summed in millionths, as whole numbers: sums are exact and the same everywhere
MOST_ROLLOUTS = 1 << 16  # of one group
Url = Field(max_length=200, pattern=r"^https?://[^\s]+$")


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# --- how a node becomes a member -------------------------------------------------------------------------------------


class InvitePayload(Message):
    """What the coordinator signs into an invite: who may join, in which role, until when. It is valid once."""

    run: str
    role: Role
    name: str = NodeName
    nonce: str = Field(pattern=r"^[0-9a-f]{32}$")
    expires_s: int
    open: bool = (
        False  # for any number of strangers, workers with enough stake, each under this name and its key's start
    )

    @model_validator(mode="after")
    def _consistent(self) -> "InvitePayload":
        if self.open and self.role != "worker":
            raise ValueError(f"an open invite is for workers, not for the role {self.role}")
        return self


class RunDescriptor(Message):
    """What a node must know about the run: the resolved config, and whose signatures are valid."""

    protocol: int
    run: str
    config: dict[str, Any]
    keys: dict[Role, list[str]]  # registered keys of the trusted roles; origin's sign manifests, validator's files


class RunOffer(Message):
    """What a run tells a machine that looks for one: what it requires of workers, and how they join it."""

    protocol: int
    run: str = Field(max_length=120)  # its id, the audience of what is signed for it
    key: str = Hex64  # its coordinator's, which signs the answer
    model: str = Field(max_length=200)
    state: Literal["running", "finished"]
    step: Count
    steps: Count
    workers: Count  # that live
    places_free: Count | None  # None: any number
    requirements: dict[str, Any]  # `[requirements]` of its config
    invite: str = Field(default="", max_length=4_000)  # open, for any worker with stake; "": only who was invited


class Capability(Message):
    """What a machine says about itself when it joins. It can shut itself out with it, and gains nothing by it."""

    device: str = Field(default="", max_length=40, pattern="^[ -~]*$")  # cpu, cuda
    engine: str = Field(default="", max_length=40, pattern="^[ -~]*$")


class Registration(Message):
    invite: str = Field(max_length=2_000)  # the Signed InvitePayload, as JSON
    url: Annotated[str, Url] | None = None  # where an origin or relay serves
    capability: Capability | None = None
    protocol: int  # VERSION of whoever sends it
    payer: str = Field(default="", pattern="^(0x[0-9a-fA-F]{40})?$")  # the account on a chain that stakes on this key


class Booking(Message):
    """What the operator was paid as stake, or pays back, where no chain keeps stakes."""

    kind: Literal["stake", "unstake", "withdraw"]
    key: str = Hex64
    amount: int = Field(default=0, ge=0, lt=1 << 62)


class Registered(Message):
    name: str
    role: Role


# --- heartbeats, tasks, and the way of a file to the pool ------------------------------------------------------------


class Intake(Message):
    """How a node received the newest weights."""

    bytes_per_s: dict[Annotated[str, Field(max_length=200)], float] = Field(
        default={}, max_length=MAX_SENDERS
    )  # by sender's URL
    behind_s: float | None = Field(default=None, ge=0)  # from their publication until they were complete here
    version: Count | None = None  # which they are
    size_bytes: Count = 0  # that were transferred
    took_s: float = Field(default=0, ge=0)
    ago_s: float = Field(default=0, ge=0)  # since they were complete


class Stats(Message):
    """What a node reports about itself, for the view and the summary. Used for display only."""

    doing: str = Field(default="", max_length=80)
    tokens: int = Field(default=0, ge=0, le=LARGEST)  # generated or checked since it started
    busy_s: float = Field(default=0, ge=0)
    waiting_s: float = Field(default=0, ge=0)
    waiting: bool = False  # if so, `doing` names what the node waits for
    rss_bytes: int = Field(default=0, ge=0, le=LARGEST)  # peak
    pid: int = Field(default=0, ge=0, le=LARGEST)
    intake: Intake = Intake()


class Fingerprint(Message):
    """Digest of what a node computes with one version on fixed inputs (`engine/selftest`). Equal ones: one class."""

    version: Count
    value: str = Hex64


class Finished(Message):
    """A submission that a worker has generated and is uploading: these bytes and no others."""

    submission: str = SubmissionId
    hash: str = Hex64  # BLAKE3 of the file


class Heartbeat(Message):
    policy_version: int | None = Field(default=None, ge=0, le=LARGEST)  # what the node has loaded or serves
    wants_task: bool = False
    working_on: list[Annotated[str, SubmissionId]] = Field(default=[], max_length=MOST_IN_FLIGHT)  # not finished yet
    stats: Stats = Stats()
    fingerprint: Fingerprint | None = None  # None: it computes nothing, or its arithmetic depends on batch shapes
    renewals: Count = 0  # how often it loaded its weights again because the coordinator asked
    finished: Finished | None = None  # a worker with accepted work gets its next task while it uploads this one


class Assignment(Message):
    """The work for one submission, and the grant to upload it. Its tasks are derived from it (`tasks.derive`)."""

    id: str = SubmissionId
    number: int = Field(ge=0)
    step: int = Field(ge=0)
    policy_version: int = Field(ge=0)
    policy_digest: str = Hex64
    nonce: str = Hex32  # unpredictable for all but the coordinator, which gives the same assignment the same one again
    groups: int = Field(ge=1)
    deadline_s: float  # unix time after which the pool no longer counts on it; it may be uploaded later
    upload_path: str
    max_bytes: int


class HeartbeatAnswer(Message):
    state: Literal["running", "finished", "evicted", "left"]  # left: it was asked to drain, and holds nothing any more
    newest_version: int | None
    relays: list[str]
    assignment: Assignment | None = None
    waiting_for: str = ""  # why there is no assignment
    reader_grant: str = ""  # lets this key read from relays and the origin, for a while; "" if it is evicted
    banned: list[str] = []  # keys that get no weights any more; for origin and relays only
    renewals: Count = 0  # how often this node was asked to load its weights again and to report a new fingerprint


class Announced(Message):
    """A file that a node is going to send, or has sent, to the pool's bucket."""

    size_bytes: int = Field(ge=1, le=LARGEST)
    sha256: str = Hex64


class UploadGrant(Message):
    """Where to PUT it, with exactly these headers."""

    url: str
    headers: dict[str, str]


class FileLink(Message):
    """Where to GET a file of the pool's bucket, and its BLAKE3."""

    url: str
    hash: str = Hex64


class Stored(Message):
    size_bytes: int
    hash: str = Hex64


class Ok(Message):
    ok: bool = True


# --- versions, batches, steps, accuracies ----------------------------------------------------------------------------


class PolicyVersion(Message):
    version: int = Field(ge=0, le=LARGEST)
    digest: str = Hex64
    size_bytes: int = Field(ge=0, le=LARGEST)


class BatchGroup(Message):
    submission: str = SubmissionId
    group: int = Field(ge=0)


class Batch(Message):
    step: int
    ready: bool
    have: int  # useful groups accepted so far and in no batch yet
    need: int
    groups: list[BatchGroup] = []


class Computed(Message):
    """How a learner computed: what must be equal for the same bits."""

    dtype: Literal["float32", "bfloat16"]
    threads: Count
    ranks: Count
    torch: str = Field(max_length=60)
    machine: str = Field(max_length=200)  # architecture, instruction set, model of the CPU or GPU


class StepRecord(Message):
    """What the learner trained on in one step and what came of it. It signs this, and the ledger keeps it."""

    run: str
    step: Count
    groups: list[BatchGroup]  # in the order in which they were trained
    files: dict[str, Annotated[str, Hex64]]  # by submission: the digest of its accepted file's rows
    before: str = Hex64  # BLAKE3 of the weights' file of version `step`
    after: str = Hex64  # likewise of version `step + 1`
    computed: Computed


class CheckpointRecord(Message):
    """The files of the learner's state before `step`, by name, with their BLAKE3. Signed, in the checkpoint's folder."""

    run: str
    step: Count
    files: dict[str, Annotated[str, Hex64]]


class StepReport(Message):
    """What the learner did in one step."""

    step: int = Field(ge=0, le=LARGEST)
    metrics: dict[str, float]
    trained: list[str]  # submission ids
    record: str = ""  # a StepRecord, Signed by the learner, as JSON


class Evaluation(Message):
    version: int = Field(ge=0, le=LARGEST)
    greedy: float | None
    sampled: float | None
    n: int = Field(ge=1, le=LARGEST)
    final: bool


# --- claims, verdicts and their reasons ------------------------------------------------------------------------------


class Reason(StrEnum):
    """Why a submission was rejected: one word per lie. `HARD` reasons are provably false and slash the worker."""

    UNREADABLE = "unreadable"  # not a rollout file, or beyond its bounds
    SIGNATURE = "signature"  # not signed by the worker that has the task, or not these rows
    CONTEXT = "context"  # made for another assignment than the one it was uploaded for, or for other prompts
    REPLAYED = "replayed"  # an accepted submission already has these rollouts
    TASKS = "tasks"  # not the derived tasks, targets or seeds
    BOUNDS = "bounds"  # token ids, lengths or numbers out of range
    ENVIRONMENT = "environment"  # an environment's answer that it does not give, or a missing one
    UNREPEATABLE = "unrepeatable"  # an answer that the environment does not give here, but may on an honest machine
    REWARD = "reward"  # claimed reward is not the recomputed one
    PROOF = "proof"  # TOPLOC: not the hidden states of the stated weights
    LOGPROBS = "logprobs"
    SAMPLING = "sampling"  # tokens are not what the seeds yield
    TERMINATION = "termination"  # stopped early
    DISTRIBUTION = "distribution"  # tokens are too likely, or too unlikely, to be samples at the stated temperature
    SPECIAL_TOKENS = "special_tokens"  # a token that only templates use, and that its seed does not yield
    INEXACT = "inexact"  # within the limits, but not bit for bit what the validator computes, whose class it claims
    SPENDING = "spending"  # with all it submitted before: choices within the limits that honest numerics do not make


# Soft: what a broken disk, a coordinator that returns to older state, a changed answer on an open link, or a program of the
# model can cause. A hard reason follows from what the worker signed, and nobody else can cause it (docs/trust.md).
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


class ClaimRequest(Message):
    most: int = Field(ge=1, le=1024)


class Claim(Message):
    """A submission to check, leased to one validator until `lease_s` (unix time)."""

    assignment: Assignment
    worker: str = Hex64
    lease_s: float
    full: bool = True  # False: cheap checks only; drawn at random, by the worker's trust
    fingerprint: str = MaybeHex64  # the worker's for this version; "": it claims no exactness class


class Claims(Message):
    claims: list[Claim]


class ContentOwner(Message):
    submission: str | None


class Sample(Message):
    """One completion as the model wrote it, for people to read. Long texts are cut in the middle."""

    task: str = Field(max_length=200)
    prompt: str = Field(max_length=4_000)
    completion: str = Field(max_length=4_000)
    reward: float
    tokens: int = Field(ge=0, le=LARGEST)


class Outcomes(Message):
    """How many completions of a group the reward graded, and how many not."""

    graded: int = Field(default=0, ge=0, le=MOST_ROLLOUTS)
    wrong_format: int = Field(default=0, ge=0, le=MOST_ROLLOUTS)  # no answer found in the completion
    grader_error: int = Field(default=0, ge=0, le=MOST_ROLLOUTS)  # the reward failed

    @property
    def total(self) -> int:
        return self.graded + self.wrong_format + self.grader_error


PartName = Annotated[str, Field(min_length=1, max_length=200)]
MOST_PARTS = 1024


class GroupResult(Message):
    """One accepted group as the validator recomputed it. `parts`: each reward's mean score, where several are weighted."""

    task: int = Field(default=0, ge=0, le=LARGEST)  # index into the training tasks
    source: str = SourceName
    target_length: int = Field(default=0, ge=0, le=LARGEST)  # tokens; 0: none
    reward_mean: float
    score_millionths: int = Field(default=0, ge=0, le=MOST_ROLLOUTS * MILLION)  # summed over its completions
    outcomes: Outcomes = Outcomes()
    parts: dict[PartName, float] = Field(default={}, max_length=MOST_PARTS)
    error: str = Field(default="", max_length=500)  # of a completion with a grader error
    useful: bool  # rewards differ, so that advantages are not all zero
    tokens: int = Field(ge=0, le=LARGEST)
    sample: Sample | None = None  # its first completion

    @model_validator(mode="after")
    def _consistent(self) -> "GroupResult":
        if self.score_millionths > self.outcomes.total * MILLION:
            raise ValueError("score_millionths exceeds one per completion")
        return self


class Replay(Message):
    """What a validator recomputed without any tolerance: sampled tokens, and how many of them differ."""

    tokens: Count
    mismatched: Count


LogEValue = Annotated[float, Field(ge=-1e6, le=1e6)]  # nats
AtLeast0 = Annotated[float, Field(ge=0, le=1e12)]
BEYOND = (0.0, 1 / 8, 1 / 2, 1.0)  # margins, in units of `validator.sampling_margin`, whose excess is counted


class ToleranceSpent(Message):
    """What one submission used of the tolerance that its checks leave. The coordinator adds it up over a worker's work.

    The four e-values have a mean of at most 1 for any honest worker (`shoal.evidence`).
    """

    exposure: AtLeast0  # sum over sampled tokens of 1 - P(token): how often numerics could have moved a token
    beyond: tuple[Count, Count, Count, Count]  # tokens that miss their seeds' tokens by more than each of BEYOND
    better: LogEValue  # these fall on a group's better completions
    worse: LogEValue  # on its worse ones
    easier: LogEValue  # on groups of higher mean reward
    harder: LogEValue
    proof_exponent_mean: AtLeast0
    proof_mantissa_mean: AtLeast0
    logprob_error_mean: AtLeast0
    distribution: LogEValue  # tokens are too likely or too unlikely
    improved: Count = 0  # rollouts that were generated again and are better than what their seeds yield
    spoiled: Count = 0  # worse

    @model_validator(mode="after")
    def _consistent(self) -> "ToleranceSpent":
        if list(self.beyond) != sorted(self.beyond, reverse=True):
            raise ValueError("beyond must not grow with the margin")
        return self


class Verdict(Message):
    submission: str = SubmissionId
    reason: Reason | None  # None: accepted
    detail: str = Field(max_length=2_000)
    evidence: dict[str, float]
    content: str | None = None  # digest of the rollouts; None where unreadable
    accepted_hash: str | None = None
    groups: list[GroupResult] = []
    replay: Replay | None = None  # None: judged within the limits, or without a prefill
    spent: ToleranceSpent | None = (
        None  # of an accepted submission that was prefilled whole and judged within the limits
    )
