"""The learning recipe as fields: tasks, sampling, loss, optimizer. Defaults are INTELLECT-2's (docs/recipe.md).

Part of the configuration; the processes' own settings, and how all of it is read, are in `config`.
Everybody may import this; it imports nobody.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Tokens = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    name: str = "bundled:smollm2-135m-instruct"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "cpu"


class TaskSection(Section):
    kind: Literal["arithmetic", "gsm8k"] = "arithmetic"
    path: str = Field(default="", description="gsm8k: a file of JSON lines or a folder; empty: the Hugging Face hub")
    sha256: str = Field(
        default="", pattern=r"^([0-9a-f]{64})?$", description="gsm8k: digest that the tasks must have; empty: any"
    )
    operand_min: int = Field(default=0, ge=0)
    operand_max: int = Field(default=29, ge=1)
    operations: list[Literal["+", "-"]] = ["+"]
    prompt: str = Field(default="{question}", description="what the user says; {question} stands for the task's own")
    system: str = Field(default="", description="system message; empty: none is written into the chat template")
    heldout: int = Field(default=256, ge=1, description="tasks set aside for evaluation, never trained on")
    length_targets: list[Tokens] = Field(
        default=[], description="target completion lengths; one is drawn per group; empty: none"
    )
    length_penalty: float = Field(default=0.0003, ge=0, description="alpha: reward lost per token off the target")

    @model_validator(mode="after")
    def _consistent(self) -> "TaskSection":
        if self.operand_min > self.operand_max:
            raise ValueError("operand_min must not exceed operand_max")
        if self.kind == "arithmetic" and (self.path or self.sha256):
            raise ValueError("path and sha256 are for kind = 'gsm8k'; sums are made, not read")
        if "{question}" not in self.prompt:
            raise ValueError("prompt must contain {question}, which stands for the task's own")
        return self


class SamplingSection(Section):
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=32768, ge=1, description="of one completion")
    group_size: int = Field(default=16, ge=2, description="G: completions of one prompt")


LossKind = Literal["grpo", "dr_grpo", "gspo", "cispo", "dppo"]


class LossSection(Section):
    kind: LossKind = "grpo"
    epsilon: float = Field(default=0.2, gt=0, lt=1, description="grpo, dr_grpo: the ratio's clip range is 1 +- epsilon")
    delta: float = Field(default=4.0, gt=1, description="grpo, dr_grpo, gspo: bound on the ratio where A < 0")
    gspo_epsilon_low: float = Field(default=3e-4, gt=0, lt=1, description="of a rollout's length-normalised ratio")
    gspo_epsilon_high: float = Field(default=4e-4, gt=0)
    cispo_max_weight: float = Field(default=5.0, ge=1, description="importance weights are cut there")
    dppo_threshold: float = Field(default=0.2, gt=0, lt=1, description="probability difference; beyond it: masked")
    dppo_max_weight: float = Field(default=20.0, ge=1, description="importance weights are cut there")
    beta: float = Field(default=0.001, ge=0, description="KL to the initial policy; 0 keeps no reference model")
    entropy: float = Field(default=1e-4, ge=0)
    normalize_std: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> "LossSection":
        if self.kind in ("grpo", "dr_grpo") and self.delta <= 1 + self.epsilon:
            raise ValueError("learner.loss.delta must exceed 1 + learner.loss.epsilon")
        if self.kind == "gspo" and self.delta <= 1 + self.gspo_epsilon_high:
            raise ValueError("learner.loss.delta must exceed 1 + learner.loss.gspo_epsilon_high")
        if self.kind == "dr_grpo" and self.normalize_std:
            raise ValueError('learner.loss.kind = "dr_grpo" has no std: set learner.loss.normalize_std = false')
        return self


class GuardSection(Section):
    """What is done about an update whose loss or gradient norm is no number, or whose norm is beyond a bound."""

    max_grad_norm: float | None = Field(default=None, gt=0, description="before clipping; none: no bound")
    action: Literal["stop", "skip"] = Field(default="stop", description="skip: leave that update out, and go on")
    max_skips: int = Field(default=3, ge=0, description="in a row; one more stops the run")


class LoraSection(Section):
    """Low-rank adapters of linear layers, in place of training all weights."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0, description="an adapter counts alpha / rank times")
    targets: list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        description="names of the layers that get one",
    )


class LearnerSection(Section):
    lr: float = Field(default=3e-7, gt=0)
    warmup_steps: int = Field(default=25, ge=0, description="optimizer steps of linear warm-up; constant after")
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=0.1, gt=0)
    optimizer_steps_per_step: int = Field(default=8, ge=1)
    row_tokens: int = Field(default=40960, ge=16, description="positions in one packed row, computed at once")
    activation_checkpointing: bool = Field(
        default=False,
        description="keep each block's input only, compute the rest again: a third more time, less memory",
    )
    keep_logits: bool = Field(
        default=False,
        description="keep a row's logits for the backward pass: no second product with the output head, for 2 or 4 bytes "
        "a trained token and entry of the vocabulary",
    )
    compile: bool = Field(
        default=False, description="torch.compile of each block; off: it needs a C++ compiler and minutes at the start"
    )
    checkpoint_every: int = Field(default=1, ge=1, description="steps")
    keep_last: int = Field(default=2, ge=1, description="newest checkpoints kept")
    keep_every: int = Field(default=0, ge=0, description="and each whose step is a multiple of this; 0: none")
    keep_versions: int = Field(default=2, ge=1, description="published folders kept at the learner")
    behaviour_logprobs: Literal["validated", "recomputed"] = Field(
        default="validated",
        description="what the ratio divides by: the sampling version's logprobs as the validator computed them, or the "
        "learner's own at the start of the step",
    )
    lora: LoraSection | None = Field(default=None, description="train adapters (extra `lora`); none: all weights")
    loss: LossSection = LossSection()
    guard: GuardSection = GuardSection()


class SftSection(Section):
    """Supervised fine-tuning, `shoal sft`; betas and weight decay are the learner's."""

    data: str = Field(default="", description=".jsonl or .parquet file, or a hub data set: org/name, org/name:pattern")
    epochs: int = Field(default=1, ge=1)
    batch_tokens: int = Field(default=16384, ge=1, description="tokens in one update, at most, but one conversation")
    batch: int | None = Field(default=None, ge=1, description="conversations in one update; none: by batch_tokens")
    lr: float = Field(default=2e-5, gt=0)
    warmup_steps: int = Field(default=25, ge=0, description="updates of linear warm-up; constant after")
    grad_clip: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(
        default=2048, ge=2, description="positions in one packed row; a conversation that is longer is dropped"
    )
    eval_frac: float = Field(default=0.05, ge=0, lt=1, description="share of conversations held out")
    checkpoint_every: int = Field(
        default=100, ge=0, description="updates between checkpoints, each with the held-out loss; 0: none are kept"
    )
