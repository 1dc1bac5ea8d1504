"""Config sections for tasks: their sources, prompts and rewards, and the sandbox."""

import re
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from shoal.config.section import Section, written_as

GRADER_ERRORS = 0.1  # maximum fraction of completions for which the reward function may fail


class SourceSection(Section):
    """One source of tasks: a file, a folder, a data set of the Hugging Face hub, or a generator."""

    name: Annotated[str, written_as("at most 60 of A-Z, a-z, 0-9, '.', '_' and '-'", r"[A-Za-z0-9._-]{0,60}")] = ""
    """Name in task ids and metrics; empty: the name of the file, data set or generator."""
    path: str = ""
    """A .jsonl, .jsonl.gz or .parquet file, or a folder of them."""
    hub: str = ""
    """A Hugging Face data set: org/name, or org/name/config."""
    generator: str = ""
    """A generator: arithmetic, functions, reasoning_gym or verifiers."""
    options: dict[str, Any] = {}
    """Options of the generator."""
    split: str = "train"
    """Split to train on, of a data set or of a folder's files."""
    heldout_split: str = ""
    """Split to evaluate on; empty: part of `split`, chosen by a hash of the question."""
    revision: str = ""
    """Commit or tag of the data set; empty: the newest."""
    fields: dict[str, str] = {}
    """Column for each of the fields question, answer, tests and metadata; empty: recognised from the schema."""
    reward: str | dict[str, float] = ""
    """number, math, code, your own function as file.py:name, or several of these with weights; empty: depends on the
    schema."""
    weight: PositiveFloat = 1.0
    """Weight of this source when groups are drawn."""
    environment: str = ""
    """Environment that answers the model between its turns: calculator, python, or your own class as file.py:Class; empty:
    none."""
    keep: str = ""
    """A manifest written by `shoal filter`; only its tasks are used."""

    @model_validator(mode="after")
    def _consistent(self) -> "SourceSection":
        given = [key for key in ("path", "hub", "generator") if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(
                f"a source needs exactly one of path, hub and generator; this one has {' and '.join(given) or 'none'}"
            )
        if self.hub and not 2 <= len(self.hub.strip("/").split("/")) <= 3:
            raise ValueError(f"hub = {self.hub!r}: write org/name, or org/name/config")
        if self.revision and not self.hub:
            raise ValueError("revision applies only to hub")
        if self.options and not self.generator:
            raise ValueError("options apply only to a generator")
        if self.generator and (self.split != "train" or self.heldout_split or self.fields):
            raise ValueError("split, heldout_split and fields do not apply to a generator")
        weights = list(self.reward.values()) if isinstance(self.reward, dict) else [1.0]
        if min(weights, default=0.0) < 0 or sum(weights) <= 0:
            raise ValueError("rewards need weights of at least 0, and one weight above 0")
        return self

    @property
    def label(self) -> str:
        """The source's name, or the name of its file, data set or generator."""
        if self.name:
            return self.name
        if self.hub:
            last = "-".join(self.hub.strip("/").split("/")[1:]) or self.hub
        else:
            last = (self.generator or self.path).rstrip("/").rpartition("/")[2]
        return re.sub(r"[^A-Za-z0-9._-]", "-", re.sub(r"\.(jsonl|jsonl\.gz|parquet)$", "", last))[:60]

    def public(self) -> "SourceSection":
        """Return what workers get to see: name, weight and environment, the latter without its folder."""
        environment = self.environment.rpartition("/")[2]
        return SourceSection(name=self.label, path=self.label, weight=self.weight, environment=environment)


class SandboxSection(Section):
    """Limits for model-written code and your own reward functions. Every machine applies the same limits."""

    cpu_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """CPU time limit in seconds; the wall-clock limit is 10 s higher."""
    memory_bytes: Annotated[int, Field(ge=64 << 20)] = 512 << 20
    """Memory limit (address space)."""


class TaskSection(Section):
    """The tasks, and how they become prompts and rewards."""

    sources: Annotated[list[SourceSection], Field(min_length=1)] = [SourceSection(generator="arithmetic")]
    """Sources of tasks."""
    digest: Annotated[str, written_as("64 hex digits", r"([0-9a-f]{64})?")] = ""
    """Required digest of all tasks, as printed by `shoal check`; empty: any."""
    prompt: str = "{question}"
    """User message; {question} is replaced by the task's question."""
    system: str = ""
    """System message; empty: none."""
    heldout: PositiveInt = 256
    """Number of tasks reserved for evaluation and never trained on."""
    length_targets: Annotated[list[PositiveInt], Field(max_length=64)] = []
    """Target completion lengths in tokens, of which each group draws one; empty: no length penalty."""
    length_penalty: NonNegativeFloat = 0.0003
    """Alpha: penalty per token of difference from the target length (INTELLECT-2)."""
    sandbox: SandboxSection = SandboxSection()

    @model_validator(mode="after")
    def _consistent(self) -> "TaskSection":
        if "{question}" not in self.prompt:
            raise ValueError("prompt must contain {question}, which is replaced by the task's question")
        labels = [source.label for source in self.sources]
        if repeated := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"two sources are named {repeated[0]}; give one of them another name")
        return self

    def public(self, digest: str) -> "TaskSection":
        """Return what workers get to see: nothing of where tasks come from, or of rewards. `digest`: of their set."""
        sources = [source.public() for source in self.sources]
        default = TaskSection().length_penalty
        return self.model_copy(update={"sources": sources, "digest": digest, "length_penalty": default})

    def source(self, label: str) -> SourceSection:
        """Return the source with this label."""
        return next(source for source in self.sources if source.label == label)
