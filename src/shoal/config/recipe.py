"""Sections of the learning recipe: model, sampling, loss, optimizer, fine-tuning. The formulas are in docs/recipe.md."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shoal.config.section import Fraction, Section, Temperature

CHECKPOINT_BYTES = 12  # per trained parameter: the fp32 master and AdamW's two moments
WRITTEN_BYTES = 10**10  # default limit of checkpoint bytes written per step


class ModelSection(Section):
    """The trained model, and how it is computed."""

    name: str = "bundled:smollm2-135m-instruct"
    """bundled:smollm2-135m-instruct, bundled:tiny, a folder (./path or /path), or a Hugging Face id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; auto: the faster one, measured at startup."""
    device: str = "cpu"
    """Torch device to compute on: cpu, cuda, cuda:1."""
    numerics: Literal["auto", "exact", "fast"] = "auto"
    """exact: a token's results have the same bits in every batch; fast: the fastest kernels; auto: exact if the machine
    supports it, else fast."""


class SamplingSection(Section):
    """How workers sample completions."""

    temperature: Temperature = 1.0
    """Sampling temperature."""
    max_tokens: PositiveInt = 32768
    """Maximum tokens of a completion, including an environment's answers; prompt and completion together must fit the
    model's context (INTELLECT-2)."""
    group_size: Annotated[int, Field(ge=2)] = 16
    """G: completions per prompt (INTELLECT-2)."""
    max_turns: Annotated[int, Field(ge=1, le=1000)] = 1
    """Maximum number of the model's turns in a completion; above 1 only for tasks whose source has an environment."""


LossKind = Literal["grpo", "dr_grpo", "gspo", "cispo", "dppo"]
BOUNDS: dict[str, dict[str, float]] = {  # defaults that differ from those of grpo
    "gspo": {"epsilon": 3e-4},  # GSPO (arXiv 2507.18071); `epsilon_high` is then 4e-4
    "cispo": {"delta": 5.0},  # ScaleRL (arXiv 2510.13786)
    "dppo": {"delta": 20.0},  # the code of DPPO's authors (arXiv 2602.04879)
}


class LossSection(Section):
    """The loss per token; docs/recipe.md has every formula."""

    kind: LossKind = "grpo"
    """Loss formula (INTELLECT-2)."""
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """grpo, dr_grpo: a token's ratio is clipped to 1 ± epsilon; gspo: a rollout's ratio is clipped to between 1 − epsilon
    and 1 + 4/3 epsilon; dppo: maximum change of a token's probability; unset: 0.2, or 3e-4 for gspo (INTELLECT-2)."""
    delta: Annotated[float, Field(gt=1)] = 4.0
    """grpo, dr_grpo, gspo: upper bound on the ratio for negative advantages; cispo, dppo: upper bound on importance
    weights; unset: 4, or 5 for cispo, or 20 for dppo (INTELLECT-2)."""
    beta: NonNegativeFloat = 0.001
    """Weight of the KL divergence to the initial policy; 0: no reference model is loaded (INTELLECT-2)."""
    entropy: NonNegativeFloat = 1e-4
    """Weight of the entropy bonus (INTELLECT-2)."""
    normalize_std: bool = False
    """Divide advantages by the group's standard deviation of rewards (GRPO does; Dr. GRPO does not)."""

    @property
    def epsilon_high(self) -> float:
        """The upper clipping bound of the ratio is 1 + epsilon_high."""
        return self.epsilon * 4 / 3 if self.kind == "gspo" else self.epsilon

    @model_validator(mode="before")
    @classmethod
    def _default_bounds(cls, values: Any) -> Any:
        """Set the default bounds of the kind."""
        return BOUNDS.get(str(values.get("kind")), {}) | values if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _consistent(self) -> "LossSection":
        if self.kind in ("grpo", "dr_grpo", "gspo") and self.delta <= 1 + self.epsilon_high:
            raise ValueError(f"learner.loss.delta must exceed 1 + {self.epsilon_high:g}, the upper bound on the ratio")
        if self.kind == "dr_grpo" and self.normalize_std:
            raise ValueError('learner.loss.kind = "dr_grpo" uses no std: set learner.loss.normalize_std = false')
        return self


class LoraSection(Section):
    """Low-rank adapters of linear layers, trained instead of all weights."""

    rank: PositiveInt = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32.0
    """Adapters are scaled by alpha / rank."""


class LearnerSection(Section):
    """The trainer: optimizer, memory, checkpoints."""

    lr: PositiveFloat = 3e-7
    """Learning rate after warm-up, constant (INTELLECT-2)."""
    warmup_steps: NonNegativeInt = 25
    """Optimizer steps of linear warm-up (INTELLECT-2)."""
    grad_clip: PositiveFloat = 0.1
    """Largest gradient norm; larger gradients are scaled down (INTELLECT-2)."""
    optimizer_steps_per_step: PositiveInt = 8
    """Optimizer steps per rollout step (INTELLECT-2)."""
    row_tokens: Annotated[int, Field(ge=16)] = 40960
    """Positions in one packed row."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more time, less memory."""
    checkpoint_every: PositiveInt | None = None
    """Rollout steps between checkpoints; none: the smallest number for which checkpoints (12 bytes per trained parameter)
    write at most 10 GB per step on average, for example 1 for 0.8 billion parameters and 10 for 7.6 billion."""
    keep_last: PositiveInt = 2
    """How many of the newest checkpoints to keep."""
    keep_versions: PositiveInt = 2
    """How many of the newest published versions to keep in the learner's folder."""
    lora: LoraSection | None = None
    """Train low-rank adapters; none: train all weights."""
    sites: NonNegativeInt = 0
    """Number of sites that the learner is spread over; they average their weights as [sites] configures; 0: one site."""
    loss: LossSection = LossSection()

    def steps_between_checkpoints(self, trained: int) -> int:
        """Return `checkpoint_every`, or its default for this number of trained parameters."""
        return self.checkpoint_every or max(1, math.ceil(CHECKPOINT_BYTES * trained / WRITTEN_BYTES))


class SftSection(Section):
    """Supervised fine-tuning, `shoal sft`."""

    data: str = ""
    """A .jsonl or .parquet file, or a Hugging Face data set: org/name or org/name:file-pattern."""
    epochs: PositiveInt = 1
    """Passes over the data."""
    batch: PositiveInt = 32
    """Conversations per update."""
    lr: PositiveFloat = 2e-5
    """AdamW learning rate."""
    warmup_steps: NonNegativeInt = 25
    """Updates of linear warm-up; the rate is constant afterwards."""
    max_tokens: Annotated[int, Field(ge=2)] = 2048
    """Positions in one packed row; longer conversations are dropped."""
    eval_frac: Fraction = 0.05
    """Fraction of the conversations that is held out."""
    checkpoint_every: NonNegativeInt = 100
    """Updates between checkpoints with held-out loss; 0: no checkpoints."""
