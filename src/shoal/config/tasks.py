"""The problems: where tasks come from, how they become prompts and rewards, and where model-written code runs."""

import re
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from shoal.config.section import Section

GRADER_ERRORS = 0.1  # largest share of completions for which a reward itself may fail


class SourceSection(Section):
    """One source of tasks, in a list: a file, a folder, a data set of the Hugging Face hub, or a generator."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,60}$")] = ""
    """Name in task ids and metrics; empty: the file's, data set's or generator's."""
    path: str = ""
    """A .jsonl, .jsonl.gz or .parquet file, or a folder of them."""
    hub: str = ""
    """A Hugging Face data set: org/name, or org/name/config."""
    generator: str = ""
    """A generator: arithmetic, functions, reasoning_gym or verifiers."""
    options: dict[str, Any] = {}
    """Options of the generator."""
    split: str = "train"
    """Split of a data set, or of a folder's files, to train on."""
    heldout_split: str = ""
    """Split to evaluate on; empty: a part of `split`, chosen by a hash of the question."""
    revision: str = ""
    """Commit or tag of the data set; empty: the newest."""
    fields: dict[str, str] = {}
    """Columns by field: question, answer, tests, metadata; empty: recognised by the schema."""
    reward: str | dict[str, float] = ""
    """number, math, code, or a function of your own as file.py:name; or several with weights; empty: the schema's."""
    weight: PositiveFloat = 1.0
    """Share of groups drawn from this source, relative to the others."""
    environment: str = ""
    """What answers the model between its turns: calculator, python, or a class of your own as file.py:Class; empty:
    nothing."""
    keep: str = ""
    """A manifest by `shoal filter`: only the tasks in it are used."""

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

    cpu_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Most seconds of CPU; by the clock 10 more."""
    memory_bytes: Annotated[int, Field(ge=64 << 20)] = 512 << 20
    """Most memory (address space)."""


class TaskSection(Section):
    """The problems, and how they become prompts and rewards."""

    sources: Annotated[list[SourceSection], Field(min_length=1)] = [SourceSection(generator="arithmetic")]
    """Where tasks come from."""
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Required digest of all tasks, as `shoal check` prints it; empty: any."""
    prompt: str = "{question}"
    """User message; {question} is replaced by the task's question."""
    system: str = ""
    """System message; empty: none."""
    heldout: PositiveInt = 256
    """Tasks reserved for evaluation and never trained on."""
    length_targets: Annotated[list[PositiveInt], Field(max_length=64)] = []
    """Target completion lengths in tokens, one drawn per group; empty: no length reward."""
    length_penalty: NonNegativeFloat = 0.0003
    """Alpha: reward lost per token of distance from the target length (INTELLECT-2)."""
    sandbox: SandboxSection = SandboxSection()

    @model_validator(mode="after")
    def _consistent(self) -> "TaskSection":
        if "{question}" not in self.prompt:
            raise ValueError("prompt must contain {question}, which is replaced by the task's question")
        labels = [source.label for source in self.sources]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"two sources are named {twice[0]}; give one of them another name")
        return self

    def source(self, label: str) -> SourceSection:
        """The source of this name."""
        return next(source for source in self.sources if source.label == label)
