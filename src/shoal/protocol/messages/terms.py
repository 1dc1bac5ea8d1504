"""What all messages are made of: bounded numbers, names and digests, and the strict base of every message."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

LARGEST = 2**53 - 1  # integer that every JSON reader and SQLite represent exactly
MAX_SENDERS = 64  # of one version, in each node's report
MOST_IN_FLIGHT = 16  # submissions that a worker generates at once (`workers.in_flight`)
VERSION = 3  # of this protocol; each side refuses one that speaks another

Role = Literal["learner", "origin", "relay", "worker", "validator", "evaluator"]
NodeState = Literal["active", "suspended", "draining", "left", "unfit", "dismissed", "banned"]  # coordinator/nodes
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
