"""The settings of each process: coordinator, store, ledger, origin, relays, workers, evaluator, and the run as a whole.

Defaults with the source INTELLECT-2 are that paper's, all others Shoal's own; `configs/` holds settings that fit a laptop.
`recipe` holds the learning.
"""

import math
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from shoal.config.section import Listen, Listening, Section

EngineName = Literal["torch", "vllm"]
TrackerName = Literal["none", "wandb", "tensorboard"]


class RunSection(Section):
    """The run as a whole."""

    seed: NonNegativeInt = 0
    """Seed of the run; another seed draws other tasks and completions."""
    steps: PositiveInt = 100
    """Rollout steps to train."""
    tracker: TrackerName = "none"
    """Experiment tracker that also gets the metrics."""


class CoordinatorSection(Listening):
    """The pool's control plane."""

    listen: Listen = "127.0.0.1:0"
    """HOST:PORT to listen on; host 0.0.0.0: all interfaces; port 0: a free one."""
    async_level: NonNegativeInt = 2
    """How many policy versions old a rollout may be when it is trained on (INTELLECT-2)."""
    prompts_per_step: PositiveInt = 256
    """Groups in a batch (INTELLECT-2)."""
    online_filter: bool = True
    """Leave groups with equal rewards out of batches: they teach nothing (INTELLECT-2)."""
    database: str = ""
    """postgresql://USER@HOST/NAME, without a password (PGPASSWORD or ~/.pgpass has it); empty: SQLite."""

    @field_validator("database")
    @classmethod
    def _postgres_without_password(cls, url: str) -> str:
        parts = urlsplit(url)
        if url and parts.scheme not in ("postgresql", "postgres"):
            raise ValueError("a database is named postgresql://USER@HOST/NAME; leave it empty for SQLite")
        if parts.password or "password" in parse_qs(parts.query):
            raise ValueError("leave the password out: set PGPASSWORD or write ~/.pgpass where the coordinator runs")
        return url


class StoreSection(Section):
    """Where rollout files are kept. The bucket's credentials are in the coordinator's environment, never here."""

    url: Annotated[str, Field(pattern=r"^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._/-]*)?)?$")] = ""
    """s3://BUCKET/PREFIX; nodes send and fetch files there by signed URLs; empty: the coordinator's folder."""
    endpoint: Annotated[str, Field(pattern=r"^(https?://[^/?#@]+)?$")] = ""
    """Where the bucket's S3 server is, as nodes reach it; empty: AWS."""


class LedgerSection(Section):
    """Where stakes are kept. The log of the pool's work is always in the coordinator's database.

    Without a contract the operator books stakes (`shoal pool stake book`); a contract holds them itself, and what the ledger
    says of accounts is repeated there.
    """

    rpc: Annotated[str, Field(pattern=r"^(https?://[^\s#@]+)?$")] = ""
    """URL of the chain's node; only the coordinator sees it."""
    contract: Annotated[str, Field(pattern="^(0x[0-9a-fA-F]{40})?$")] = ""
    """Its address on the chain, which `shoal pool stake deploy` prints; empty: no chain."""
    key_file: str = ""
    """File of the private key of the contract's operator, in hex, on the coordinator's machine; empty: the chain's node
    signs with its own first account."""


class OriginSection(Listening):
    """The server that publishes the learner's weights."""

    listen: Listen = "127.0.0.1:0"
    """HOST:PORT to listen on and to announce to the pool; port 0: a free one."""


class RelaySection(Listening):
    """Mirrors of the origin."""

    reach: Literal["auto", "local", "private", "public"] = "auto"
    """Addresses that relays may announce and nodes connect to: this machine's too, private networks' too, or only the
    internet's; auto: local if the coordinator listens on loopback, else public."""
    count: PositiveInt = 1
    """Relays that `shoal run` starts."""
    listen: Listen = "127.0.0.1:0"
    """HOST:PORT to listen on and to announce to the pool; port 0: a free one."""


class WorkerSection(Section):
    """The machines that generate rollouts."""

    count: PositiveInt = 2
    """Workers that `shoal run` starts."""
    engines: Annotated[list[EngineName], Field(min_length=1)] = ["torch"]
    """What they generate with, in turn, and what `shoal calibrate` measures; vllm needs an environment of its own
    (docs/operate.md)."""
    groups_per_submission: PositiveInt = 4
    """Groups in one submission of a newcomer, and of a worker as fast as most."""
    in_flight: Annotated[int, Field(ge=1, le=16)] = 1
    """Submissions that a worker may generate at once, so that its batch stays full while the longest completions of one
    end."""

    def engine(self, number: int) -> EngineName:
        """What the worker of this number generates with."""
        return self.engines[number % len(self.engines)]

    @property
    def largest(self) -> int:
        """Groups in the largest submission, of a much faster worker."""
        return 8 * self.groups_per_submission


EVALUATED_AT_ONCE = 64  # completions that an evaluation asks its engine for together


class EvaluatorSection(Section):
    """Held-out accuracy of published versions."""

    every: NonNegativeInt = 0
    """Versions between evaluations during the run; 0: only the first and last version."""
    n: PositiveInt = 256
    """Held-out tasks of the first and last evaluation."""


# --- what submissions, workers and machines must meet ----------------------------------------------------------------------

RATES = (0.1, 0.03, 2e-3, 1e-3)  # until they are measured: wider than all honest machines measured so far
ROW_TOKENS = 1024  # positions in one row of a validator's prefill; a longer rollout gets a longer row
MISMATCH_SHARE = 0.001  # of a submission's tokens that may be mismatches, beside `validator.sampling_mismatches`
LEAST_ESCROW_CHECKS = 16


Limit = Literal[
    "proof_exponent_mean", "proof_mantissa_mean", "logprob_error_mean", "sampling_margin", "sampling_margin_mean"
]
Kind = Annotated[
    str, Field(pattern="^vllm/[a-z0-9]+$")
]  # torch workers name no engine: an entry would be a liar's alone


class ValidatorSection(Section):
    """The limits that submissions must meet. `shoal calibrate` measures them."""

    count: PositiveInt = 1
    """Validators that `shoal run` starts."""
    limits: dict[Kind, dict[Limit, PositiveFloat]] = {}
    """Limits for the work of another engine on one kind of device, such as vllm/cpu, which a submission's signed header
    names; what is left out is as for all (measured by `shoal calibrate`)."""
    proof_exponent_mean: PositiveFloat = 10.0
    """Largest mean number of differing exponents per proof, over a submission (measured by `shoal calibrate`)."""
    proof_mantissa_mean: PositiveFloat = 2.4
    """Largest mean mantissa error per proof, over a submission (measured by `shoal calibrate`)."""
    logprob_error_mean: PositiveFloat = 0.1
    """Largest mean logprob error in nats, over a submission's tokens (measured by `shoal calibrate`)."""
    sampling_margin: PositiveFloat = 0.75
    """Nats by which a token may score below the token its seed selects; further is a mismatch (measured by `shoal
    calibrate`)."""
    sampling_mismatches: NonNegativeInt = 2
    """Mismatches that a submission may have, beside one in 1,000 tokens (measured by `shoal calibrate`)."""
    sampling_margin_mean: PositiveFloat = 0.02
    """Largest mean margin in nats, over a submission's tokens; one beyond `sampling_margin` counts as 0 (measured by
    `shoal calibrate`)."""
    classes: Literal["any", "exact"] = "any"
    """Whose work is taken; any: also of machines that compute unlike every validator, within the limits; exact: only
    what a validator computes to the last bit, so tasks go only to workers of a live validator's class."""
    check_floor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest share of a trusted worker's submissions that are prefilled whole; 1: all. Of the others two rollouts
    are."""

    @property
    def escrow_checks(self) -> int:
        """Whole prefills that a worker must pass after a submission before it is credited; rejected lies take the credit
        that waits. With fewer than 1 / check_floor lies would pay (docs/trust.md)."""
        return max(LEAST_ESCROW_CHECKS, math.ceil(1 / self.check_floor))

    def allowed_mismatches(self, tokens: int) -> float:
        """How many of so many tokens may be farther than `sampling_margin` from what their seeds yield."""
        return self.sampling_mismatches + MISMATCH_SHARE * tokens

    def of(self, engine: str) -> "ValidatorSection":
        """As for submissions of this ENGINE/DEVICE: its own limits, where it has some."""
        own: dict[str, Any] = {str(limit): value for limit, value in self.limits.get(engine, {}).items()}
        return self.model_copy(update=own)

    def widest(self, limit: Limit) -> float:
        """As for the engine for which this limit is widest; a worker can name any."""
        own: float = getattr(self, limit)
        return max([own, *(limits.get(limit, own) for limits in self.limits.values())])


class EvidenceSection(Section):
    """Tests over all submissions of a worker, where one check leaves tolerance. The bounds are of measured honest work."""

    rates: tuple[float, float, float, float] = RATES
    """Honest tokens that miss their seeds' by more than 0, 1/8, 1/2 and 1 times validator.sampling_margin, for each
    token that numerics could move (measured by `shoal calibrate`)."""
    regenerated: NonNegativeInt = 0
    """Rollouts of a submission that a validator generates again, of those with a token that is not their seed's, to see
    whether the worker chose for the reward."""
    proof_exponent_mean: PositiveFloat | None = None
    """Honest average of the figure that validator.proof_exponent_mean limits; none: 2/3 of the limit (measured by
    `shoal calibrate`)."""
    proof_mantissa_mean: PositiveFloat | None = None
    """Likewise; none: 2/3 of the limit (measured by `shoal calibrate`)."""
    logprob_error_mean: PositiveFloat | None = None
    """Likewise; none: 2/3 of the limit (measured by `shoal calibrate`)."""


class RequirementsSection(Section):
    """What a worker must have to join."""

    engines: list[str] = []
    """Engines that may generate, such as "torch", by the worker's own report; empty: any."""
    stake: NonNegativeInt = 0
    """What a stranger must have staked to join with an open invite, in the ledger's unit."""
    places: NonNegativeInt = 0
    """Live workers at once; no more may join; 0: any number."""
