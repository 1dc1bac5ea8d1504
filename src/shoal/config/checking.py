"""What submissions, workers and machines must meet: limits, tests over many submissions, requirements."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.config.section import Section

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
