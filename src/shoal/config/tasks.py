"""The problems: where tasks come from, how they become prompts and rewards, and where model-written code runs."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shoal.config.section import PAPER, Section

Tokens = Annotated[int, Field(ge=1)]


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
        description="number, math, code, or a function of your own as file.py:name; or several with weights; empty: "
        "the schema's",
    )
    weight: float = Field(
        default=1.0, gt=0, description="share of groups drawn from this source, relative to the others"
    )
    prompt: str = Field(default="", description="user message of this source's tasks; empty: tasks.prompt")
    environment: str = Field(
        default="",
        description="what answers the model between its turns: calculator, python, or a class of your own as "
        "file.py:Class; empty: nothing",
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
    """Where model-written code and rewards of your own run, and what one run may use. The same on every machine."""

    tier: Literal["auto", "bubblewrap", "kernel", "rlimits"] = Field(
        default="auto",
        description="auto: the strongest that works, bubblewrap or kernel; rlimits does not isolate and needs "
        "SHOAL_TRUST_RUN=1 on each machine",
    )
    cpu_s: float = Field(default=5.0, gt=0, le=600, description="most seconds of CPU")
    wall_s: float = Field(default=15.0, gt=0, le=3600, description="most seconds by the clock")
    memory_bytes: int = Field(default=512 << 20, ge=64 << 20, description="most memory (address space)")
    numpy: bool = Field(default=False, description="whether rewards and environments of your own may import numpy")


class TaskSection(Section):
    """The problems, and how they become prompts and rewards."""

    sources: list[SourceSection] = Field(
        default=[SourceSection(generator="arithmetic")], min_length=1, description="where tasks come from"
    )
    digest: str = Field(
        default="",
        pattern=r"^([0-9a-f]{64})?$",
        description="required digest of all tasks, as `shoal check` prints it; empty: any",
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
