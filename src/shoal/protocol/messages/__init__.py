"""Every message between machines, in one place. The rollout files are in `store/` because they need pyarrow.

Invariant: models are strict: unknown fields, wrong types and out-of-range numbers are refused before anything is built.
Every room that talks over HTTP imports this, never a file in it; nothing else of Shoal is imported here.

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
    validator     GET  /v1/missed/{key}                  -> MissedTasks (of one worker)
    validator     PUT  /v1/accepted/{id}                Parquet -> Stored
    validator     POST /v1/verdicts                     Verdict -> Ok
    these two     GET  /v1/curricula/{digest}           -> CurriculumPage (what an assignment's tasks are drawn by)
    origin        POST /v1/policies                     Policy -> Ok
    every node    GET  /v1/ledger/{after}               -> the ledger's entries after this one, as JSON lines
    validator     POST /v1/heads                        Signed[Head] -> Ok (an entry that it saw, co-signed)
    learner       GET  /v1/batches/{step}               -> Batch
    learner       GET  /v1/accepted/{id}                -> Parquet
    learner       POST /v1/steps                        StepReport -> Ok
    evaluator     POST /v1/evaluations                  Evaluation -> Ok
    anyone        GET  /v1/status                       -> Status (now)
    anyone        GET  /v1/history?after=CURSOR         -> History (metrics, evaluations, samples after the cursor)
    anyone        GET  /metrics                         -> the pool's metrics, in Prometheus' text format
"""

from shoal.protocol.messages.checking import (
    BEYOND,
    HARD,
    Claim,
    ClaimRequest,
    Claims,
    ContentOwner,
    CurriculumPage,
    GroupResult,
    Outcomes,
    Reason,
    Replay,
    Sample,
    Spent,
    Verdict,
)
from shoal.protocol.messages.joining import (
    Booking,
    Capability,
    InvitePayload,
    Registered,
    Registration,
    RunDescriptor,
    RunOffer,
)
from shoal.protocol.messages.learning import (
    Batch,
    BatchGroup,
    CheckpointRecord,
    Computed,
    Evaluation,
    Policy,
    StepRecord,
    StepReport,
)
from shoal.protocol.messages.living import (
    Announced,
    Assignment,
    Fingerprint,
    Finished,
    Grant,
    Heartbeat,
    HeartbeatAnswer,
    Intake,
    Link,
    MissedTasks,
    Ok,
    Stats,
    Stored,
)
from shoal.protocol.messages.terms import LARGEST, MAX_SENDERS, MILLION, VERSION, NodeState, Role
from shoal.protocol.messages.watching import Exactness, Grading, History, NodeStatus, Signal, Status, WorkerSample

__all__ = [
    "Announced", "Assignment", "BEYOND", "Batch", "BatchGroup", "Booking", "Capability", "CheckpointRecord", "Claim",
    "ClaimRequest", "Claims", "Computed", "ContentOwner", "CurriculumPage", "Evaluation", "Exactness",
    "Fingerprint", "Finished", "Grading", "Grant", "GroupResult", "HARD", "Heartbeat", "HeartbeatAnswer", "History",
    "Intake", "InvitePayload", "LARGEST", "Link", "MAX_SENDERS", "MILLION", "MissedTasks", "NodeState",
    "NodeStatus", "Ok", "Outcomes", "Policy", "Reason", "Registered", "Registration", "Replay", "Role",
    "RunDescriptor", "RunOffer", "Sample", "Signal", "Spent", "Stats", "Status", "StepRecord",
    "StepReport", "Stored", "VERSION", "Verdict", "WorkerSample",
]  # fmt: skip
