"""The learning recipe: model, sampling, loss, optimizer, fine-tuning. The formulas are in docs/recipe.md.

`tasks` holds the problems, `sections` and `checking` each process's own settings.
"""

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from shoal.config.section import DR_GRPO, PAPER, Decay, Section

CHECKPOINT_BYTES = 12  # per trained parameter: the fp32 master and two moments of AdamW, which no optimizer exceeds
WRITTEN_BYTES = 10**10  # of checkpoints a step, at most, by default


class ModelSection(Section):
    """The model that is trained, and what it is computed in."""

    name: str = Field(
        default="bundled:smollm2-135m-instruct",
        description="bundled:smollm2-135m-instruct, bundled:tiny, a folder (./path or /path), or a Hugging Face id",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="compute dtype; auto: the faster one, measured at start"
    )
    device: str = Field(default="cpu", description="torch device to compute on: cpu, cuda, cuda:1")
    numerics: Literal["auto", "exact", "fast"] = Field(
        default="auto",
        description="exact: a token's results have the same bits in every batch; fast: the fastest kernels; auto: exact "
        "where the machine can, else fast",
    )


class SamplingSection(Section):
    """How workers sample completions."""

    temperature: float = Field(default=1.0, gt=0, description="sampling temperature")
    noise: Literal["shoal", "vllm"] = Field(
        default="shoal",
        description="what seeded tokens are drawn with; vllm: the noise of vLLM's own seeded sampler, which workers on its "
        "second model runner use as it is",
    )
    max_tokens: int = Field(
        default=32768,
        ge=1,
        description="longest completion, an environment's answers included; it and the prompt must fit the model's "
        "positions",
        json_schema_extra=PAPER,
    )
    group_size: int = Field(default=16, ge=2, description="G: completions per prompt", json_schema_extra=PAPER)
    max_turns: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="turns of the model in one completion; above 1 for tasks whose source has an environment",
    )


LossKind = Literal["grpo", "dr_grpo", "gspo", "cispo", "dppo"]
BOUNDS: dict[str, dict[str, float]] = {  # of each kind whose own they are
    "gspo": {"epsilon": 3e-4, "epsilon_high": 4e-4},  # GSPO (arXiv 2507.18071)
    "cispo": {"delta": 5.0},  # ScaleRL (arXiv 2510.13786)
    "dppo": {"delta": 20.0},  # DPPO (arXiv 2602.04879), the authors' code
}


class LossSection(Section):
    """The loss per token; docs/recipe.md has every formula."""

    kind: LossKind = Field(default="grpo", description="loss formula", json_schema_extra=PAPER)
    epsilon: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="how far down the ratio (gspo: of a rollout) may move before it is clipped; dppo: how far a token's "
        "probability may move either way; unset: 0.2, for gspo 3e-4",
        json_schema_extra=PAPER,
    )
    delta: float = Field(
        default=4.0,
        gt=1,
        description="grpo, dr_grpo, gspo: upper bound on the ratio for negative advantages; cispo, dppo: on importance "
        "weights; unset: 4, for cispo 5, for dppo 20",
        json_schema_extra=PAPER,
    )
    epsilon_high: float = Field(
        default=0.2,
        gt=0,
        description="the same distance upwards; unset: epsilon, and for gspo 4e-4",
        json_schema_extra=PAPER,
    )
    beta: float = Field(
        default=0.001,
        ge=0,
        description="weight of the KL to the initial policy; 0: no reference model is loaded",
        json_schema_extra=PAPER,
    )
    entropy: float = Field(default=1e-4, ge=0, description="weight of the entropy bonus", json_schema_extra=PAPER)
    normalize_std: bool = Field(
        default=False,
        description="divide advantages by the group's standard deviation of rewards",
        json_schema_extra=DR_GRPO,
    )

    @model_validator(mode="before")
    @classmethod
    def _bounds_of_the_kind(cls, values: Any) -> Any:
        """Let bounds that are not set follow the kind, and `epsilon_high` follow `epsilon`."""
        if not isinstance(values, dict):
            return values
        own = BOUNDS.get(str(values.get("kind")), {})
        if "epsilon" in values:
            own = own | {"epsilon_high": values["epsilon"]}
        return own | values

    @model_validator(mode="after")
    def _consistent(self) -> "LossSection":
        if self.kind in ("grpo", "dr_grpo", "gspo") and self.delta <= 1 + self.epsilon_high:
            raise ValueError("learner.loss.delta must exceed 1 + learner.loss.epsilon_high")
        if self.kind == "dr_grpo" and self.normalize_std:
            raise ValueError('learner.loss.kind = "dr_grpo" has no std: set learner.loss.normalize_std = false')
        return self


class GuardSection(Section):
    """What happens to an update whose loss or gradient norm is not finite or exceeds a bound."""

    max_grad_norm: float | None = Field(
        default=None, gt=0, description="largest accepted gradient norm, before clipping; none: no bound"
    )
    action: Literal["stop", "skip"] = Field(
        default="stop", description="stop: end the run; skip: omit the update and continue"
    )


class LoraSection(Section):
    """Low-rank adapters of linear layers, trained in place of all weights."""

    rank: int = Field(default=16, ge=1, description="rank of each adapter")
    alpha: float = Field(default=32.0, gt=0, description="adapters are scaled by alpha / rank")
    targets: list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        description="names of the layers that get an adapter",
    )


class LearnerSection(Section):
    """The trainer: optimizer, memory, checkpoints."""

    lr: float = Field(default=3e-7, gt=0, description="learning rate after warm-up", json_schema_extra=PAPER)
    warmup_steps: int = Field(
        default=25,
        ge=0,
        description="optimizer steps of linear warm-up",
        json_schema_extra=PAPER,
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="the learning rate after warm-up", json_schema_extra=PAPER
    )
    schedule_steps: int | None = Field(
        default=None,
        ge=1,
        description="optimizer steps, warm-up included, after which a linear or cosine schedule is at its end: usually "
        "run.steps × optimizer_steps_per_step",
    )
    final_lr_frac: float = Field(
        default=0.0, ge=0, le=1, description="share of lr at the end of a linear or cosine schedule, and from then on"
    )
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.99), description="AdamW decay rates of the two moments")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay, in proportion to the learning rate")
    grad_clip: float = Field(
        default=0.1,
        gt=0,
        description="largest gradient norm; larger gradients are scaled down",
        json_schema_extra=PAPER,
    )
    optimizer_steps_per_step: int = Field(
        default=8, ge=1, description="optimizer steps per rollout step", json_schema_extra=PAPER
    )
    row_tokens: int = Field(default=40960, ge=16, description="positions in one packed row, computed at once")
    activation_checkpointing: bool = Field(
        default=False, description="recompute activations in the backward pass: about a third more time, less memory"
    )
    offload: bool = Field(
        default=False,
        description="keep masters, the optimizer's state and summed gradients in the host's memory, and step the optimizer "
        "there: less of the device's memory, more time",
    )
    compile: bool = Field(
        default=False, description="torch.compile each block; needs a C++ compiler and minutes at start"
    )
    checkpoint_every: int | None = Field(
        default=None,
        ge=1,
        description="rollout steps between checkpoints; none: as many as keep writing at 10 GB a step or less, 12 bytes a "
        "trained parameter each: 1 up to 0.8 billion, 10 for 7.6 billion, 40 for 32.8 billion",
    )
    keep_last: int = Field(default=2, ge=1, description="newest checkpoints kept")
    keep_every: int = Field(
        default=0, ge=0, description="also keep checkpoints whose step is a multiple of this; 0: none"
    )
    keep_versions: int = Field(default=2, ge=1, description="newest published versions kept in the learner's folder")
    behaviour_logprobs: Literal["validated", "recomputed"] = Field(
        default="validated",
        description="denominator of the ratio; validated: logprobs that the validator computed under the sampling "
        "version; recomputed: the learner's own at the start of the step",
    )
    lora: LoraSection | None = Field(default=None, description="train low-rank adapters; none: train all weights")
    sites: int = Field(
        default=0,
        ge=0,
        description="sites that the learner is spread over, which meet by [sites]; 0: it is at one place",
    )
    loss: LossSection = LossSection()
    guard: GuardSection = GuardSection()

    def steps_between_checkpoints(self, trained: int) -> int:
        """`checkpoint_every`, or its default for so many trained parameters."""
        return self.checkpoint_every or max(1, math.ceil(CHECKPOINT_BYTES * trained / WRITTEN_BYTES))

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> "LearnerSection":
        if self.schedule != "constant" and (self.schedule_steps or 0) <= self.warmup_steps:
            raise ValueError(
                f'schedule = "{self.schedule}" needs schedule_steps above warmup_steps = {self.warmup_steps}: the optimizer '
                "steps at whose end the rate is lr × final_lr_frac"
            )
        return self


class SftSection(Section):
    """Supervised fine-tuning, `shoal sft`; betas and weight decay are the learner's."""

    data: str = Field(
        default="",
        description="a .jsonl or .parquet file, or a Hugging Face data set: org/name or org/name:file-pattern",
    )
    epochs: int = Field(default=1, ge=1, description="passes over the data")
    batch_tokens: int = Field(
        default=16384, ge=1, description="most tokens per update; a longer conversation is an update of its own"
    )
    batch: int | None = Field(
        default=None, ge=1, description="conversations per update; none: as many as batch_tokens allows"
    )
    lr: float = Field(default=2e-5, gt=0, description="AdamW learning rate")
    warmup_steps: int = Field(
        default=25, ge=0, description="updates of linear warm-up; the rate is constant afterwards"
    )
    max_tokens: int = Field(
        default=2048, ge=2, description="positions in one packed row; longer conversations are dropped"
    )
    eval_frac: float = Field(default=0.05, ge=0, lt=1, description="share of the conversations that is held out")
    checkpoint_every: int = Field(
        default=100, ge=0, description="updates between checkpoints with held-out loss; 0: no checkpoints"
    )
