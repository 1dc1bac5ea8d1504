"""The sections of pretraining and of several sites. Defaults are DiLoCo's (arXiv 2311.08105, table 5) where it has one."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shoal.config.section import Fraction, Listen, Listening, Section

Numbers = Literal["fp64", "fp32", "fp16", "bf16", "int8", "int4"]  # on the wire


class PretrainSection(Section):
    """Training on plain text, `shoal pretrain`."""

    data: str = ""
    """Files of text: a path, a pattern with *, or ORGANISATION/NAME:PATTERN for a data set on the Hugging Face hub;
    .jsonl, .json (one object a line, also with .gz), .parquet or .txt."""
    field: str = "text"
    """The field or column that holds the text."""
    init: Literal["random", "weights"] = "random"
    """Start from random weights drawn with run.seed, or from those of model.name."""
    steps: PositiveInt = 88000
    """Inner steps to train (DiLoCo)."""
    batch: PositiveInt = 512
    """Sequences per step and site, over all its ranks (DiLoCo)."""
    micro_batch: PositiveInt = 8
    """Sequences computed at once."""
    tokens: Annotated[int, Field(ge=2)] = 1024
    """Tokens of a sequence (DiLoCo)."""
    lr: PositiveFloat = 4e-4
    """Largest AdamW learning rate, which falls to 0 along a cosine (DiLoCo)."""
    warmup_steps: NonNegativeInt = 1000
    """Steps of linear warm-up (DiLoCo)."""
    heldout: NonNegativeInt = 64
    """Documents at the start of the data that are held out."""
    checkpoint_every: PositiveInt = 500
    """Steps between checkpoints, and between measurements of the held-out loss."""


class SitesSection(Listening):
    """Several sites that train one model: with [pretrain], or as a run's learner (`learner.sites`).

    They meet once in `inner_steps`; the learner's sites meet once a step. The outer step of the learner's sites follows
    `learner.sites` where it is not set: bf16 numbers, rate 1 and no momentum, which is the average; 300 seconds to wait.
    """

    sites: PositiveInt = 2
    """Sites that the first round waits for, and invites that are made."""
    inner_steps: PositiveInt = 500
    """Inner steps between two meetings (DiLoCo)."""
    kind: Numbers = "fp16"
    """Numbers on the wire (OpenDiLoCo)."""
    lr: PositiveFloat = 0.7
    """Learning rate of the outer step (DiLoCo)."""
    momentum: Fraction = 0.9
    """Nesterov momentum of the outer step (DiLoCo)."""
    quorum: PositiveInt = 1
    """Fewest sites whose offers close a round."""
    wait_s: PositiveFloat = 60
    """Seconds from a round's first offer until it closes."""
    listen: Listen = "127.0.0.1:0"
    """HOST:PORT that the meeting listens on; host 0.0.0.0: all interfaces; port 0: a free one."""
    url: str = ""
    """Where sites reach the meeting, such as a proxy with TLS; empty: where it listens."""

    @property
    def terms(self) -> dict[str, Any]:
        """What sites and meeting must know of a round."""
        return self.model_dump(include={"kind", "lr", "momentum", "wait_s", "quorum", "sites"})

    @model_validator(mode="after")
    def _consistent(self) -> "SitesSection":
        if self.quorum > self.sites:
            raise ValueError("sites.quorum exceeds sites.sites, so no round would close")
        return self
