"""What learner, origin and evaluator ask and say: versions, batches, steps, accuracies."""

from typing import Annotated, Literal

from pydantic import Field

from shoal.protocol.messages.terms import LARGEST, Count, Hex64, Message, SubmissionId


class Policy(Message):
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
