"""The learning recipe: model, sampling, loss, optimizer, fine-tuning. The formulas are in docs/recipe.md.

`tasks` holds the problems, `sections` each process's own settings.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shoal.config.section import Fraction, Section

CHECKPOINT_BYTES = 12  # per trained parameter: the fp32 master and two moments of AdamW, which no optimizer exceeds
WRITTEN_BYTES = 10**10  # of checkpoints a step, at most, by default


class ModelSection(Section):
    """The model that is trained, and what it is computed in."""

    name: str = "bundled:smollm2-135m-instruct"
    """bundled:smollm2-135m-instruct, bundled:tiny, a folder (./path or /path), or a Hugging Face id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; auto: the faster one, measured at start."""
    device: str = "cpu"
    """Torch device to compute on: cpu, cuda, cuda:1."""
    numerics: Literal["auto", "exact", "fast"] = "auto"
    """exact: a token's results have the same bits in every batch; fast: the fastest kernels; auto: exact where the
    machine can, else fast."""


class SamplingSection(Section):
    """How workers sample completions."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    max_tokens: PositiveInt = 32768
    """Longest completion, an environment's answers included; it and the prompt must fit the model's positions
    (INTELLECT-2)."""
    group_size: Annotated[int, Field(ge=2)] = 16
    """G: completions per prompt (INTELLECT-2)."""
    max_turns: Annotated[int, Field(ge=1, le=1000)] = 1
    """Turns of the model in one completion; above 1 for tasks whose source has an environment."""


LossKind = Literal["grpo", "dr_grpo", "gspo", "cispo", "dppo"]
BOUNDS: dict[str, dict[str, float]] = {  # of each kind whose own they are
    "gspo": {"epsilon": 3e-4},  # GSPO (arXiv 2507.18071), which has 4e-4 upwards
    "cispo": {"delta": 5.0},  # ScaleRL (arXiv 2510.13786)
    "dppo": {"delta": 20.0},  # DPPO (arXiv 2602.04879), the authors' code
}


class LossSection(Section):
    """The loss per token; docs/recipe.md has every formula."""

    kind: LossKind = "grpo"
    """Loss formula (INTELLECT-2)."""
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """How far the ratio may move before it is clipped; gspo: a rollout's ratio, down, and a third further up; dppo: how
    far a token's probability may move; unset: 0.2, for gspo 3e-4 (INTELLECT-2)."""
    delta: Annotated[float, Field(gt=1)] = 4.0
    """grpo, dr_grpo, gspo: upper bound on the ratio for negative advantages; cispo, dppo: on importance weights; unset:
    4, for cispo 5, for dppo 20 (INTELLECT-2)."""
    beta: NonNegativeFloat = 0.001
    """Weight of the KL to the initial policy; 0: no reference model is loaded (INTELLECT-2)."""
    entropy: NonNegativeFloat = 1e-4
    """Weight of the entropy bonus (INTELLECT-2)."""
    normalize_std: bool = False
    """Divide advantages by the group's standard deviation of rewards (Dr. GRPO)."""

    @property
    def epsilon_high(self) -> float:
        """How far up the ratio may move before it is clipped."""
        return self.epsilon * 4 / 3 if self.kind == "gspo" else self.epsilon

    @model_validator(mode="before")
    @classmethod
    def _bounds_of_the_kind(cls, values: Any) -> Any:
        """Let bounds that are not set follow the kind."""
        return BOUNDS.get(str(values.get("kind")), {}) | values if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _consistent(self) -> "LossSection":
        if self.kind in ("grpo", "dr_grpo", "gspo") and self.delta <= 1 + self.epsilon_high:
            raise ValueError(f"learner.loss.delta must exceed 1 + {self.epsilon_high:g}, the upper bound on the ratio")
        if self.kind == "dr_grpo" and self.normalize_std:
            raise ValueError('learner.loss.kind = "dr_grpo" has no std: set learner.loss.normalize_std = false')
        return self


class LoraSection(Section):
    """Low-rank adapters of linear layers, trained in place of all weights."""

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
    """Positions in one packed row, computed at once."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more time, less memory."""
    checkpoint_every: PositiveInt | None = None
    """Rollout steps between checkpoints; none: as many as keep writing at 10 GB a step or less, 12 bytes a trained
    parameter each: 1 up to 0.8 billion, 10 for 7.6 billion, 40 for 32.8 billion."""
    keep_last: PositiveInt = 2
    """Newest checkpoints kept."""
    keep_versions: PositiveInt = 2
    """Newest published versions kept in the learner's folder."""
    lora: LoraSection | None = None
    """Train low-rank adapters; none: train all weights."""
    sites: NonNegativeInt = 0
    """Sites that the learner is spread over, which meet by [sites]; 0: it is at one place."""
    loss: LossSection = LossSection()

    def steps_between_checkpoints(self, trained: int) -> int:
        """`checkpoint_every`, or its default for so many trained parameters."""
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
    """Share of the conversations that is held out."""
    checkpoint_every: NonNegativeInt = 100
    """Updates between checkpoints with held-out loss; 0: no checkpoints."""
