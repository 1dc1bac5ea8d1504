"""What validators ask and say: claims, verdicts and their reasons, pages of the curriculum."""

import hashlib
from enum import StrEnum
from itertools import pairwise
from typing import Annotated

from pydantic import Field, model_validator

from shoal.protocol.messages.living import Assignment
from shoal.protocol.messages.terms import (
    LARGEST,
    MILLION,
    MOST_ROLLOUTS,
    Count,
    Hex64,
    MaybeHex64,
    Message,
    SourceName,
    SubmissionId,
)


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
MOST_MISSED = 128  # tokens that a verdict names, for people to see
BEYOND = (0.0, 1 / 8, 1 / 2, 1.0)  # margins, in units of `validator.sampling_margin`, whose excess is counted


class Spent(Message):
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
    def _consistent(self) -> "Spent":
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
    spent: Spent | None = None  # of an accepted submission that was prefilled whole and judged within the limits
    missed: list[tuple[Count, Count, AtLeast0]] | None = Field(
        default=None, max_length=MOST_MISSED
    )  # tokens that miss those their seeds yield, the farthest first: rollout, position, nats; None: not computed


class CurriculumPage(Message):
    """What became known of training tasks before `step` opened: a link in a chain from the run's first page.

    Its SHA-256 names it. `tasks` follows from the run's accepted verdicts, whoever computes it.
    """

    step: int = Field(ge=0, le=LARGEST)
    previous: str = MaybeHex64  # digest of the page before it; "": this is the first
    tasks: list[
        tuple[Count, Count, Count]
    ] = []  # task index, rollouts, their scores in millionths; by index, each once

    @model_validator(mode="after")
    def _consistent(self) -> "CurriculumPage":
        if any(later[0] <= task[0] for task, later in pairwise(self.tasks)):
            raise ValueError("tasks must be in order of their index, each once")
        if any(score > rollouts * MILLION for _, rollouts, score in self.tasks):
            raise ValueError("a task's score exceeds one per rollout")
        return self

    def digest(self) -> str:
        return hashlib.sha256(f"shoal/curriculum\n{self.model_dump_json()}".encode()).hexdigest()
