"""What members say and hear all the time: heartbeats, assignments, and the way of a file to the pool."""

from typing import Annotated, Literal

from pydantic import Field

from shoal.protocol.messages.terms import (
    LARGEST,
    MAX_SENDERS,
    MOST_IN_FLIGHT,
    Count,
    Hex32,
    Hex64,
    MaybeHex64,
    Message,
    SubmissionId,
)


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
    curriculum: str = MaybeHex64  # the newest CurriculumPage it is drawn by; "": none
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


class MissedTasks(Message):
    """What a worker was given and never uploaded: `tasks.missed` says what that did to the reward."""

    worker: str = Hex64
    given: Count
    missed: Count
    newest: list[Assignment]  # of the missed ones, oldest first


class Announced(Message):
    """A file that a node is going to send, or has sent, to the pool's bucket."""

    size_bytes: int = Field(ge=1, le=LARGEST)
    sha256: str = Hex64


class Grant(Message):
    """Where to PUT it, with exactly these headers."""

    url: str
    headers: dict[str, str]


class Link(Message):
    """Where to GET a file of the pool's bucket, and its BLAKE3."""

    url: str
    hash: str = Hex64


class Stored(Message):
    size_bytes: int
    hash: str = Hex64


class Ok(Message):
    ok: bool = True
