"""The learning recipe: model, tasks, sampling, loss, optimizer. The formulas are in docs/recipe.md.

`sections` holds each process's own settings, `loading` reads files, and `explain` prints descriptions and sources.
Every field has a description; a section's is its docstring. A default that is not Shoal's own names its source.
"""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.config import JsonDict

from shoal.config.section import Decay, Section
from shoal.config.sites import LearnerSitesSection

Tokens = Annotated[int, Field(ge=1)]

CHECKPOINT_BYTES = 12  # per trained parameter: the fp32 master and two moments of AdamW, which no optimizer exceeds
WRITTEN_BYTES = 10**10  # of checkpoints a step, at most, by default

# Where a default is from; a field without a source has Shoal's own default.
PAPER: JsonDict = {"source": "INTELLECT-2 (arXiv 2505.07291)"}
MEASURED: JsonDict = {"source": "measured by `shoal calibrate`, see docs/trust.md"}
DR_GRPO: JsonDict = {"source": "Dr. GRPO (arXiv 2503.20783)"}
GSPO: JsonDict = {"source": "GSPO (arXiv 2507.18071)"}
SCALE_RL: JsonDict = {"source": "ScaleRL (arXiv 2510.13786)"}
PRIME_RL: JsonDict = {"source": "PRIME-RL"}
MUON: JsonDict = {"source": "Muon, kellerjordan.github.io/posts/muon"}
DPPO: JsonDict = {"source": "DPPO (arXiv 2602.04879), the authors' code"}


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


class SourceSection(Section):
    """One source of tasks, in a list: a file, a folder, a data set of the Hugging Face hub, or a generator."""

    name: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9._-]{0,60}$",
        description="name in task ids and metrics; empty: the file's, data set's or generator's",
    )
    path: str = Field(default="", description="a .jsonl, .jsonl.gz or .parquet file, or a folder of them")
    hub: str = Field(default="", description="a Hugging Face data set: org/name, or org/name/config")
    generator: str = Field(default="", description="a generator: arithmetic, functions, reasoning_gym or verifiers")
    options: dict[str, Any] = Field(default={}, description="options of the generator")
    split: str = Field(default="train", description="split of a data set, or of a folder's files, to train on")
    heldout_split: str = Field(
        default="", description="split to evaluate on; empty: a part of `split`, chosen by a hash of the question"
    )
    revision: str = Field(default="", description="commit or tag of the data set; empty: the newest")
    fields: dict[str, str] = Field(
        default={}, description="columns by field: question, answer, tests, metadata; empty: recognised by the schema"
    )
    reward: str | dict[str, float] = Field(
        default="",
        description="number, math, code, or a function of one's own as file.py:name; or several with weights; empty: "
        "the schema's",
    )
    weight: float = Field(
        default=1.0, gt=0, description="share of groups drawn from this source, relative to the others"
    )
    prompt: str = Field(default="", description="user message of this source's tasks; empty: tasks.prompt")
    environment: str = Field(
        default="", description="what answers the model between its turns: calculator or python; empty: nothing"
    )
    keep: str = Field(default="", description="a manifest by `shoal filter`: only the tasks in it are used")

    @model_validator(mode="after")
    def _consistent(self) -> "SourceSection":
        given = [key for key in ("path", "hub", "generator") if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(
                f"a source has one of path, hub and generator; this one has {' and '.join(given) or 'none'}"
            )
        if self.hub and not 2 <= len(self.hub.strip("/").split("/")) <= 3:
            raise ValueError(f"hub = {self.hub!r}: write org/name, or org/name/config")
        if self.revision and not self.hub:
            raise ValueError("revision applies only to hub")
        if self.options and not self.generator:
            raise ValueError("options apply only to a generator")
        if self.prompt and "{question}" not in self.prompt:
            raise ValueError("prompt must contain {question}, which is replaced by the task's question")
        weights = list(self.reward.values()) if isinstance(self.reward, dict) else [1.0]
        if min(weights, default=0.0) < 0 or sum(weights) <= 0:
            raise ValueError("rewards need weights of 0 or more, one of them above 0")
        return self

    @property
    def label(self) -> str:
        """The source's name, given or derived."""
        if self.name:
            return self.name
        if self.hub:
            last = "-".join(self.hub.strip("/").split("/")[1:]) or self.hub
        else:
            last = (self.generator or self.path).rstrip("/").rpartition("/")[2]
        return re.sub(r"[^A-Za-z0-9._-]", "-", re.sub(r"\.(jsonl|jsonl\.gz|parquet)$", "", last))[:60]


class SandboxSection(Section):
    """Where model-written code and rewards of one's own run, and what one run may use. The same on every machine."""

    tier: Literal["auto", "bubblewrap", "kernel", "rlimits"] = Field(
        default="auto",
        description="auto: the strongest that works, bubblewrap or kernel; rlimits does not isolate and needs "
        "SHOAL_TRUST_RUN=1 on each machine",
    )
    cpu_s: float = Field(default=5.0, gt=0, le=600, description="most seconds of CPU")
    wall_s: float = Field(default=15.0, gt=0, le=3600, description="most seconds by the clock")
    memory_bytes: int = Field(default=512 << 20, ge=64 << 20, description="most memory (address space)")


class TaskSection(Section):
    """The problems, and how they become prompts and rewards."""

    sources: list[SourceSection] = Field(
        default=[SourceSection(generator="arithmetic")], min_length=1, description="where tasks come from"
    )
    digest: str = Field(
        default="",
        pattern=r"^([0-9a-f]{64})?$",
        description="required digest of all tasks, as `shoal prepare` prints it; empty: any",
    )
    prompt: str = Field(default="{question}", description="user message; {question} is replaced by the task's question")
    system: str = Field(default="", description="system message; empty: none")
    heldout: int = Field(default=256, ge=1, description="tasks reserved for evaluation and never trained on")
    length_mode: Literal["target", "max", "off"] = Field(
        default="target",
        description="what a target length is; target: a completion loses reward for every token of distance; max: for "
        "every token beyond it; off: targets are not used",
        json_schema_extra=PAPER,
    )
    length_targets: list[Tokens] = Field(
        default=[],
        max_length=64,
        description="target completion lengths in tokens, one drawn per group; empty: no length reward",
    )
    length_penalty: float = Field(
        default=0.0003,
        ge=0,
        description="alpha: reward lost per token of distance from the target length",
        json_schema_extra=PAPER,
    )
    grader_error_limit: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="largest share of grader errors among the newest 512 rollouts; beyond it `shoal run` stops; 1: never",
    )
    curriculum: Literal["uniform", "pass_rate"] = Field(
        default="uniform",
        description="how tasks of a source are drawn; uniform: all alike; pass_rate: those solved about half of the time "
        "more often",
    )
    sandbox: SandboxSection = SandboxSection()

    @model_validator(mode="after")
    def _consistent(self) -> "TaskSection":
        if "{question}" not in self.prompt:
            raise ValueError("prompt must contain {question}, which is replaced by the task's question")
        labels = [source.label for source in self.sources]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"two sources are named {twice[0]}; give one of them another name")
        return self

    @property
    def targets(self) -> list[int]:
        """The target lengths that groups get."""
        return [] if self.length_mode == "off" else self.length_targets

    def source(self, label: str) -> SourceSection:
        """The source of this name."""
        return next(source for source in self.sources if source.label == label)


class SamplingSection(Section):
    """How workers sample completions."""

    temperature: float = Field(default=1.0, gt=0, description="sampling temperature")
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


class LossSection(Section):
    """The loss per token; docs/recipe.md has every formula."""

    kind: LossKind = Field(default="grpo", description="loss formula", json_schema_extra=PAPER)
    epsilon: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="grpo, dr_grpo: the ratio is clipped to 1 ± epsilon",
        json_schema_extra=PAPER,
    )
    delta: float = Field(
        default=4.0,
        gt=1,
        description="grpo, dr_grpo, gspo: upper bound on the ratio for negative advantages",
        json_schema_extra=PAPER,
    )
    gspo_epsilon_low: float = Field(
        default=3e-4,
        gt=0,
        lt=1,
        description="gspo: lower clip distance of a rollout's length-normalised ratio",
        json_schema_extra=GSPO,
    )
    gspo_epsilon_high: float = Field(
        default=4e-4, gt=0, description="gspo: upper clip distance of the same ratio", json_schema_extra=GSPO
    )
    cispo_max_weight: float = Field(
        default=5.0, ge=1, description="cispo: upper bound on importance weights", json_schema_extra=SCALE_RL
    )
    dppo_threshold: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="dppo: tokens whose probability moved further than this are masked",
        json_schema_extra=PRIME_RL,
    )
    dppo_max_weight: float = Field(
        default=20.0, ge=1, description="dppo: upper bound on importance weights", json_schema_extra=DPPO
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
    """What happens to an update whose loss or gradient norm is not finite or exceeds a bound."""

    max_grad_norm: float | None = Field(
        default=None, gt=0, description="largest accepted gradient norm, before clipping; none: no bound"
    )
    action: Literal["stop", "skip"] = Field(
        default="stop", description="stop: end the run; skip: omit the update and continue"
    )
    max_skips: int = Field(default=3, ge=0, description="skipped updates allowed in a row; one more stops the run")


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

    optimizer: Literal["adamw", "adamw_8bit", "muon"] = Field(
        default="adamw",
        description="adamw_8bit: moments in 8 bits, 6 bytes of state an entry instead of 12, needs the extra 8bit; muon: "
        "Muon for the matrices of the blocks, AdamW for embeddings, output head, norms and biases, 8 bytes a "
        "matrix entry",
        json_schema_extra=PAPER,
    )
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
    momentum: Decay = Field(default=0.95, description="Muon decay rate of its momentum", json_schema_extra=MUON)
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
    stream: bool = Field(
        default=False,
        description="compute rows of a step's first update while its batch fills, as soon as accepted groups fill them; the "
        "weights are the same bit for bit",
    )
    activation_checkpointing: bool = Field(
        default=False, description="recompute activations in the backward pass: about a third more time, less memory"
    )
    keep_logits: bool = Field(
        default=False,
        description="keep a row's logits for the backward pass: saves one product with the output head, costs 2 or 4 "
        "bytes per trained token and vocabulary entry",
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
    sites: LearnerSitesSection | None = Field(
        default=None, description="spread the learner over several sites; none: it is one"
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

    @model_validator(mode="after")
    def _muon_has_matrices(self) -> "LearnerSection":
        if self.optimizer == "muon" and self.lora is not None:
            raise ValueError(
                'optimizer = "muon" trains whole matrices; set optimizer = "adamw" or remove [learner.lora]'
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
    grad_clip: float = Field(default=1.0, gt=0, description="largest gradient norm; larger gradients are scaled down")
    max_tokens: int = Field(
        default=2048, ge=2, description="positions in one packed row; longer conversations are dropped"
    )
    eval_frac: float = Field(default=0.05, ge=0, lt=1, description="share of the conversations that is held out")
    checkpoint_every: int = Field(
        default=100, ge=0, description="updates between checkpoints with held-out loss; 0: no checkpoints"
    )
