"""What anyone may read of a run: its state now, and its history."""

from typing import Literal

from pydantic import Field

from shoal.protocol.messages.checking import Sample
from shoal.protocol.messages.joining import Capability
from shoal.protocol.messages.learning import Evaluation
from shoal.protocol.messages.living import Stats
from shoal.protocol.messages.terms import Count, MaybeHex64, Message, NodeName, NodeState, Role, SubmissionId


class NodeStatus(Message):
    name: str
    role: Role
    url: str | None
    policy_version: int | None
    seen_s: float
    evicted: bool
    state: NodeState = "active"
    reason: str = ""  # for its state
    suspended_s: float = Field(default=0, ge=0)  # until it gets tasks again; 0: it is not suspended
    suspension: str = ""  # why
    missed: int = Field(default=0, ge=0)  # tasks that it was given and never uploaded
    accepted: int
    rejected: int
    stats: Stats
    credited: Count = 0  # tokens of accepted work, paid for good
    pending: Count = 0  # tokens of accepted work whose credit waits for more checks
    evidence: float = (
        0.0  # nats that its submissions together speak against honesty; ln(1 / evidence.ALPHA) dismisses it
    )
    fingerprint: str = MaybeHex64  # of the newest version it reported; "": it is in no exactness class
    tokens_per_s: float = 0.0  # from task to upload, of its accepted work; 0: not measured yet
    size: Count = 0  # groups in its usual task; 0: a newcomer's
    capability: Capability = Capability()  # as it reported


class Exactness(Message):
    """Work that was replayed without any tolerance."""

    submissions: Count = 0  # accepted
    tokens: Count = 0  # sampled tokens of these: each the argmax, with equal logprob and proof, to the last bit
    mismatched_tokens: Count = 0  # in submissions that were rejected as `inexact`


class Signal(Message):
    """Whether the accepted groups teach anything: the rewards of a useful group differ."""

    groups: int = Field(default=0, ge=0)  # accepted while the open step has been open
    useful: int = Field(default=0, ge=0)  # of these
    flat: int = Field(default=0, ge=0)  # newest accepted groups in a row with equal rewards
    lowest: float | None = None  # mean rewards of those
    highest: float | None = None


class Grading(Message):
    """How the reward fared with the newest accepted rollouts."""

    total: int = Field(default=0, ge=0)  # rollouts accepted in the whole run
    recent: int = Field(default=0, ge=0)  # the newest of them, which the next figure is about
    errors: int = Field(default=0, ge=0)  # grader errors
    error: str = ""  # of the newest one


class Status(Message):
    run: str
    state: Literal["running", "finished"]
    step: int  # the smallest step that lacks accepted rollouts
    steps: int
    have: int
    need: int
    newest_version: int | None
    started_s: float
    now_s: float
    nodes: list[NodeStatus]
    trained: int  # steps
    notices: list[str]  # for the operator, newest last
    reject_reasons: dict[str, int]
    slashed: list[str]
    stale_groups: int  # useful groups that became too old before they got into a batch
    late_groups: Count = 0  # in submissions whose upload was refused because no batch could use them any more
    useful_groups: Count = 0  # accepted so far, those that became too old included
    tokens_generated: int  # accepted tokens, counted by the validators
    signal: Signal = Signal()
    grading: Grading = Grading()
    exact: Exactness = Exactness()


class WorkerSample(Sample):
    """A sample, and who generated it."""

    submission: str = SubmissionId
    group: int = Field(ge=0)
    worker: str = NodeName
    policy_version: int = Field(ge=0)


class History(Message):
    """Entries after a cursor, oldest first. A step that is reported again appears again."""

    cursor: int = Field(ge=0)  # for the next request
    metrics: list[dict[str, float]]  # one per trained step
    evaluations: list[Evaluation]
    samples: list[WorkerSample]
