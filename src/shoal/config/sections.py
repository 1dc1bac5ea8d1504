"""Config sections for each process, for the limits of submissions, and for the requirements of workers."""

import math
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from shoal.config.section import Listening, Rate, Section, written_as

EngineName = Literal["torch", "vllm"]
TrackerName = Literal["none", "wandb", "tensorboard"]


class RunSection(Section):
    """The run as a whole."""

    seed: NonNegativeInt = 0
    """Seed of the run, which determines tasks and completions."""
    steps: PositiveInt = 100
    """Number of rollout steps to train."""
    tracker: TrackerName = "none"
    """Experiment tracker that receives the metrics."""


class CoordinatorSection(Listening):
    """The pool's control plane."""

    async_level: NonNegativeInt = 2
    """How many policy versions old a rollout may be when it is trained on (INTELLECT-2)."""
    prompts_per_step: PositiveInt = 256
    """Groups per batch (INTELLECT-2)."""
    online_filter: bool = True
    """Omit groups with equal rewards from batches, because they teach nothing (INTELLECT-2)."""
    database: str = ""
    """postgresql://USER@HOST/NAME, without a password (set PGPASSWORD or write ~/.pgpass); empty: SQLite."""

    @field_validator("database")
    @classmethod
    def _postgres_without_password(cls, url: str) -> str:
        parts = urlsplit(url)
        if url and parts.scheme not in ("postgresql", "postgres"):
            raise ValueError("write postgresql://USER@HOST/NAME, or leave it empty for SQLite")
        if parts.password or "password" in parse_qs(parts.query):
            raise ValueError("leave the password out: set PGPASSWORD or write ~/.pgpass where the coordinator runs")
        return url


class StoreSection(Section):
    """Where rollout files are stored. Set a bucket's credentials in the coordinator's environment, not in the config."""

    url: Annotated[
        str, written_as("s3://BUCKET/PREFIX", r"(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._/-]*)?)?")
    ] = ""
    """s3://BUCKET/PREFIX, which nodes access with signed URLs; empty: the coordinator's folder."""
    endpoint: Annotated[str, written_as("http://HOST:PORT or https://HOST:PORT", r"(https?://[^/?#@]+)?")] = ""
    """URL of the S3 server, which nodes must be able to reach; empty: AWS."""


class LedgerSection(Section):
    """Where stakes are kept. The log of the pool's work is always in the coordinator's database.

    Without a contract, the operator books stakes (`shoal pool stake book`). With one, the contract holds them, and the
    ledger's entries about accounts are copied to it.
    """

    rpc: Annotated[str, written_as("a URL as in http://HOST:PORT, without a user", r"(https?://[^\s#@]+)?")] = ""
    """URL of a node of the chain. Only the coordinator sees it."""
    contract: Annotated[str, written_as("0x and 40 hex digits", "(0x[0-9a-fA-F]{40})?")] = ""
    """Address of the contract, as printed by `shoal pool stake deploy`; empty: no chain."""
    key_file: str = ""
    """File on the coordinator's machine with the private key of the contract's operator, in hex; empty: the chain's node
    signs with its first account."""


class OriginSection(Listening):
    """The server that publishes the learner's weights."""

    url: Annotated[
        str,
        written_as("http://HOST:PORT or https://HOST:PORT", r"(https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:\d+)?)?"),
    ] = ""
    """URL to announce, if nodes do not reach the address in `listen`: behind NAT, in most clouds, or behind a proxy."""


class RelaySection(Listening):
    """Mirrors of the origin."""

    reach: Literal["auto", "local", "private", "public"] = "auto"
    """Addresses that relays may announce and nodes connect to; public: on the internet only; private: also private
    networks; local: also private networks and loopback; auto: local if the coordinator listens on loopback, else public."""
    count: PositiveInt = 1
    """Number of relays that `shoal run` starts."""


class WorkerSection(Section):
    """The machines that generate rollouts."""

    count: PositiveInt = 2
    """Number of workers that `shoal run` starts."""
    engines: Annotated[list[EngineName], Field(min_length=1)] = ["torch"]
    """Engines, assigned to workers in turn and measured by `shoal calibrate`; vllm needs its own Python environment
    (docs/operate.md)."""
    groups_per_submission: PositiveInt = 4
    """Groups in one submission of a worker that is new or of typical speed."""
    in_flight: Annotated[int, Field(ge=1, le=16)] = 1
    """Submissions that a worker may generate at the same time. With several, its batch stays full while the longest
    completions of one submission finish."""

    def engine(self, number: int) -> EngineName:
        """Return the engine of the worker with this number."""
        return self.engines[number % len(self.engines)]

    @property
    def largest(self) -> int:
        """Groups in the largest submission, for a much faster worker."""
        return 8 * self.groups_per_submission


EVALUATED_AT_ONCE = 64  # completions that an evaluation requests from its engine together


class EvaluatorSection(Section):
    """Held-out accuracy of published versions."""

    every: NonNegativeInt = 0
    """Versions between evaluations during the run; 0: only the first and last version."""
    n: PositiveInt = 256
    """Number of held-out tasks in the first and last evaluation."""


# --- limits of submissions, requirements of workers -------------------------------------------------------------------

RATES = (0.1, 0.03, 2e-3, 1e-3)  # used without calibration: higher than any rate measured on honest machines
ROW_TOKENS = 1024  # positions in one row of a validator's prefill; a longer rollout gets a longer row
MISMATCH_SHARE = 0.001  # fraction of tokens that may be mismatches, in addition to `validator.sampling_mismatches`
MIN_ESCROW_CHECKS = 16


Limit = Literal[
    "proof_exponent_mean", "proof_mantissa_mean", "logprob_error_mean", "sampling_margin", "sampling_margin_mean"
]
# Torch workers name no engine, so only a liar could use limits for torch.
EngineOnDevice = Annotated[str, written_as("vllm/DEVICE, as in vllm/cuda", "vllm/[a-z0-9]+")]


class ValidatorSection(Section):
    """The limits that submissions must meet. `shoal calibrate` measures them."""

    count: PositiveInt = 1
    """Number of validators that `shoal run` starts."""
    limits: dict[EngineOnDevice, dict[Limit, PositiveFloat]] = {}
    """Other limits for an engine on a kind of device, by the name in a submission's signed header, such as vllm/cpu
    (measured by `shoal calibrate`)."""
    proof_exponent_mean: PositiveFloat = 10.0
    """Maximum mean number of differing exponents per proof, over a submission (measured by `shoal calibrate`)."""
    proof_mantissa_mean: PositiveFloat = 2.4
    """Maximum mean mantissa error per proof, over a submission (measured by `shoal calibrate`)."""
    logprob_error_mean: PositiveFloat = 0.1
    """Maximum mean logprob error in nats, over a submission's tokens (measured by `shoal calibrate`)."""
    sampling_margin: PositiveFloat = 0.75
    """Nats by which a token may score below the token its seed selects; a token further below is a mismatch (measured by
    `shoal calibrate`)."""
    sampling_mismatches: NonNegativeInt = 2
    """Mismatches allowed per submission of more than 70 tokens, in addition to one per 1,000 tokens."""
    sampling_margin_mean: PositiveFloat = 0.02
    """Maximum mean margin in nats, over a submission's tokens; a mismatch counts as 0 (measured by `shoal calibrate`)."""
    classes: Literal["any", "exact"] = "any"
    """Which machines may work; any: all whose results are within the limits; exact: only those whose results a live
    validator reproduces bit for bit."""
    check_floor: Rate = 1.0
    """Minimum fraction of a trusted worker's submissions that is prefilled whole; 1: all. Of each other submission, two
    rollouts are prefilled."""

    @property
    def escrow_checks(self) -> int:
        """Number of whole prefills that a worker must pass after a submission before that submission is credited. A
        rejected lie forfeits the credit in escrow. With fewer than 1 / check_floor checks, lies would pay
        (docs/trust.md)."""
        return max(MIN_ESCROW_CHECKS, math.ceil(1 / self.check_floor))

    def of(self, engine: str) -> "ValidatorSection":
        """Return the section with the limits that apply to submissions of this ENGINE/DEVICE."""
        own: dict[str, Any] = {str(limit): value for limit, value in self.limits.get(engine, {}).items()}
        return self.model_copy(update=own)

    def widest(self, limit: Limit) -> float:
        """Return the largest value of this limit over all engines, because a worker can name any engine."""
        own: float = getattr(self, limit)
        return max([own, *(limits.get(limit, own) for limits in self.limits.values())])


class EvidenceSection(Section):
    """Tests over all submissions of a worker, for lies within the tolerance of single checks. `shoal calibrate` measures
    the bounds on honest work."""

    rates: tuple[Rate, Rate, Rate, Rate] = RATES
    """Upper bounds on the rates at which an honest worker's tokens score below the token that their seed yields, by more
    than 0, 1/8, 1/2 and 1 times validator.sampling_margin. Rates are per token that numerics could change (measured by
    `shoal calibrate`)."""
    regenerated: NonNegativeInt = 0
    """Number of rollouts per submission that the validator generates again, to test whether the worker chose tokens by
    reward. Only rollouts in which a token differs from the one that its seed yields are drawn."""
    proof_exponent_mean: PositiveFloat | None = None
    """Honest mean of the figure that validator.proof_exponent_mean limits; none: 2/3 of the limit (measured by `shoal
    calibrate`)."""
    proof_mantissa_mean: PositiveFloat | None = None
    """Honest mean of the figure that validator.proof_mantissa_mean limits; none: 2/3 of the limit (measured by `shoal
    calibrate`)."""
    logprob_error_mean: PositiveFloat | None = None
    """Honest mean of the figure that validator.logprob_error_mean limits; none: 2/3 of the limit (measured by `shoal
    calibrate`)."""


class RequirementsSection(Section):
    """Requirements for workers to join."""

    engines: list[str] = []
    """Engines that workers may use, such as "torch"; workers report theirs when they join; empty: any."""
    stake: Annotated[int, Field(ge=0, lt=1 << 256)] = 0
    """Stake required to join with an open invite, in the ledger's unit."""
    places: NonNegativeInt = 0
    """Maximum number of live workers; 0: no limit. Those with too little stake at risk do not count."""
