"""What submissions, workers and machines must meet: limits, tests over many submissions, requirements."""

from typing import Literal

from pydantic import Field

from shoal.config.section import MEASURED, PAPER, Section

RATES = (0.1, 0.03, 2e-3, 1e-3)  # until they are measured: wider than all honest machines measured so far


OF_ALL = "see [validator]; none: as there"


class EngineLimits(Section):
    """`[[validator.limits]]`: limits for the work of one engine on one kind of device. What is left out is as for all."""

    engine: Literal["vllm"] = Field(
        default="vllm",
        description="the engine that a submission's signed header names; the torch engine's limits are those of [validator]",
    )
    device: str = Field(default="cpu", description="and its device, such as cpu or cuda", pattern="^[a-z0-9]+$")
    proof_exponent_mean: float | None = Field(default=None, gt=0, description=OF_ALL, json_schema_extra=MEASURED)
    proof_mantissa_mean: float | None = Field(default=None, gt=0, description=OF_ALL, json_schema_extra=MEASURED)
    logprob_error_mean: float | None = Field(default=None, gt=0, description=OF_ALL, json_schema_extra=MEASURED)
    sampling_margin: float | None = Field(default=None, gt=0, description=OF_ALL, json_schema_extra=MEASURED)
    sampling_margin_mean: float | None = Field(default=None, gt=0, description=OF_ALL, json_schema_extra=MEASURED)

    @property
    def kind(self) -> str:
        return f"{self.engine}/{self.device}"


class ValidatorSection(Section):
    """The limits that submissions must meet. `shoal calibrate` measures them."""

    count: int = Field(default=1, ge=1, description="validators that `shoal run` starts")
    limits: list[EngineLimits] = []
    row_tokens: int = Field(
        default=4096, ge=16, description="positions in one row of the prefill; a longer rollout gets a longer row"
    )
    proof_exponent_mean: float = Field(
        default=10.0,
        gt=0,
        description="largest mean number of differing exponents per proof, over a submission",
        json_schema_extra=MEASURED,
    )
    proof_mantissa_mean: float = Field(
        default=2.4,
        gt=0,
        description="largest mean mantissa error per proof, over a submission",
        json_schema_extra=MEASURED,
    )
    logprob_error_mean: float = Field(
        default=0.1,
        gt=0,
        description="largest mean logprob error in nats, over a submission's tokens",
        json_schema_extra=MEASURED,
    )
    sampling_margin: float = Field(
        default=0.75,
        gt=0,
        description="nats by which a token may score below the token its seed selects; further is a mismatch",
        json_schema_extra=MEASURED,
    )
    sampling_mismatch_frac: float = Field(
        default=0.001,
        ge=0,
        description="largest share of mismatches among a submission's tokens",
        json_schema_extra=MEASURED,
    )
    sampling_mismatches: int = Field(
        default=2, ge=0, description="extra mismatches always allowed per submission", json_schema_extra=MEASURED
    )
    sampling_margin_mean: float = Field(
        default=0.02,
        gt=0,
        description="largest mean margin in nats, over a submission's tokens; one beyond `sampling_margin` counts as 0",
        json_schema_extra=MEASURED,
    )
    eos_probability: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="a completion may end early only where the end token's probability exceeds this",
        json_schema_extra=PAPER,
    )
    classes: Literal["any", "exact"] = Field(
        default="any",
        description="whose work is taken; any: also of machines that compute unlike every validator, within the limits; "
        "exact: only what a validator computes to the last bit, so tasks go only to workers of a live validator's class",
    )
    check_floor: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="smallest share of a trusted worker's submissions that are prefilled whole; 1: all. Of the others "
        "two rollouts are",
    )
    trust_after: int = Field(
        default=32, ge=1, description="honest submissions in a row that halve the share that is prefilled"
    )
    unchecked_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="largest share of a batch's groups from submissions that were not prefilled whole; when enough of them "
        "wait, every submission is",
    )
    escrow_checks: int = Field(
        default=16,
        ge=1,
        description="whole prefills that a worker must pass after a submission before it is credited; rejected lies take "
        "the credit that waits. At least 1 / check_floor",
    )

    def of(self, engine: str) -> "ValidatorSection":
        """As for submissions of this ENGINE/DEVICE: its own limits, where it has some."""
        own = next((one for one in self.limits if engine == one.kind), None)
        if own is None:
            return self
        return self.model_copy(update=own.model_dump(exclude={"engine", "device"}, exclude_none=True))

    def widest(self, limit: str) -> float:
        """As for the engine for which this limit is widest; a worker can name any."""
        every: list[float] = [
            getattr(section, limit) for section in [self, *(self.of(one.kind) for one in self.limits)]
        ]
        return max(every)


class EvidenceSection(Section):
    """Tests over all submissions of a worker, where one check leaves tolerance. The bounds are of measured honest work."""

    rates: tuple[float, float, float, float] = Field(
        default=RATES,
        description="honest tokens that miss their seeds' by more than 0, 1/8, 1/2 and 1 times validator.sampling_margin, "
        "for each token that numerics could move",
        json_schema_extra=MEASURED,
    )
    regenerated: int = Field(
        default=0,
        ge=0,
        description="rollouts of a submission that a validator generates again, of those with a token that is not their "
        "seed's, to see whether the worker chose for the reward",
    )
    proof_exponent_mean: float | None = Field(
        default=None,
        gt=0,
        description="honest average of the figure that validator.proof_exponent_mean limits; none: 2/3 of the limit",
        json_schema_extra=MEASURED,
    )
    proof_mantissa_mean: float | None = Field(
        default=None, gt=0, description="likewise; none: 2/3 of the limit", json_schema_extra=MEASURED
    )
    logprob_error_mean: float | None = Field(
        default=None, gt=0, description="likewise; none: 2/3 of the limit", json_schema_extra=MEASURED
    )


class RequirementsSection(Section):
    """What a machine must have to get tasks of this run. All but speed is its own report; speed is measured."""

    memory_gib: float = Field(default=0, ge=0, description="memory of a worker's machine in GiB, as it reports")
    tokens_per_s: float = Field(
        default=0,
        ge=0,
        description="tokens per second from task to upload, measured over a worker's accepted work; 0: any",
    )
    engines: list[str] = Field(default=[], description='engines that may generate, such as "torch"; empty: any')
    devices: list[str] = Field(default=[], description='devices of workers, such as "cpu" or "cuda"; empty: any')
    stake: int = Field(
        default=0,
        ge=0,
        description="what a stranger must have staked to join with an open invite, in the ledger's unit",
    )
    places: int = Field(default=0, ge=0, description="live workers at once; no more may join; 0: any number")
