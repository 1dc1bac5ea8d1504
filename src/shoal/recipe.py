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
    kind: Literal["arithmetic"] = "arithmetic"
    operand_min: int = Field(default=0, ge=0)
    operand_max: int = Field(default=29, ge=1)
    operations: list[Literal["+", "-"]] = ["+"]
    prompt: str = Field(default="{question}", description="what the user says; {question} is the sum")
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
        if "{question}" not in self.prompt:
            raise ValueError("prompt must contain {question}, which stands for the sum")
        return self


class SamplingSection(Section):
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=32768, ge=1, description="of one completion")
    group_size: int = Field(default=16, ge=2, description="G: completions of one prompt")


class LossSection(Section):
    kind: Literal["grpo"] = "grpo"
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    delta: float = Field(default=4.0, gt=1)
    beta: float = Field(default=0.001, ge=0, description="KL to the initial policy; 0 keeps no reference model")
    entropy: float = Field(default=1e-4, ge=0)
    normalize_std: bool = False


class LearnerSection(Section):
    lr: float = Field(default=3e-7, gt=0)
    warmup_steps: int = Field(default=25, ge=0, description="optimizer steps of linear warm-up; constant after")
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=0.1, gt=0)
    optimizer_steps_per_step: int = Field(default=8, ge=1)
    row_tokens: int = Field(default=40960, ge=16, description="positions in one packed row")
    rows_per_microbatch: int = Field(default=1, ge=1)
    checkpoint_every: int = Field(default=1, ge=1, description="steps")
    keep_versions: int = Field(default=2, ge=1, description="published folders kept at the learner")
    loss: LossSection = LossSection()
