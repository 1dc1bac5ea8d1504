"""Config sections for pretraining and several sites. Defaults are DiLoCo's where it names one (2311.08105, table 5)."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shoal.config.section import Fraction, Listening, Section

Numbers = Literal["fp64", "fp32", "fp16", "bf16", "int8", "int4"]


class PretrainSection(Section):
    """Training on plain text, `shoal pretrain`."""

    data: str = ""
    """Text files: a path, a pattern with *, or ORGANISATION/NAME:PATTERN for a data set on the Hugging Face hub. Formats:
    .jsonl, .json (one object per line, also with .gz), .parquet or .txt."""
    field: str = "text"
    """Field or column with the text."""
    init: Literal["random", "weights"] = "random"
    """random: start from random weights drawn with run.seed; weights: start from those of model.name."""
    steps: PositiveInt = 88000
    """Inner steps to train (DiLoCo)."""
    batch: PositiveInt = 512
    """Sequences per step and site, over all ranks of the site (DiLoCo)."""
    micro_batch: PositiveInt = 8
    """Sequences per forward pass."""
    tokens: Annotated[int, Field(ge=2)] = 1024
    """Tokens per sequence (DiLoCo)."""
    lr: PositiveFloat = 4e-4
    """Peak AdamW learning rate, with cosine decay to a tenth of it."""
    warmup_steps: NonNegativeInt = 1000
    """Steps of linear warm-up (DiLoCo)."""
    heldout: NonNegativeInt = 64
    """Number of documents at the start of the data that are held out."""
    checkpoint_every: PositiveInt = 500
    """Steps between checkpoints, and between measurements of the held-out loss."""


class SitesSection(Listening):
    """Several sites that train one model: with [pretrain], or as a run's learner (`learner.sites`).

    Pretraining sites meet every `inner_steps`; a learner's sites meet every step. With `learner.sites` the defaults are
    bf16, rate 1 and momentum 0, which is plain averaging, and 300 seconds to wait.
    """

    sites: PositiveInt = 2
    """Number of sites: the first round waits for all of them, and each gets an invite."""
    inner_steps: PositiveInt = 500
    """Inner steps between two rounds (DiLoCo)."""
    kind: Numbers = "fp16"
    """Number format on the network (OpenDiLoCo)."""
    lr: PositiveFloat = 0.7
    """Learning rate of the outer step (DiLoCo)."""
    momentum: Fraction = 0.9
    """Nesterov momentum of the outer step (DiLoCo)."""
    quorum: PositiveInt = 1
    """Minimum number of sites that must make an offer before a round can close."""
    wait_s: PositiveFloat = 60
    """Seconds from a round's first offer until the round closes."""
    url: str = ""
    """URL at which sites reach the meeting, for example through a proxy with TLS; empty: the address in `listen`."""

    @property
    def terms(self) -> dict[str, Any]:
        """The settings of a round that sites and meeting share."""
        return self.model_dump(include={"kind", "lr", "momentum", "wait_s", "quorum", "sites"})

    @model_validator(mode="after")
    def _consistent(self) -> "SitesSection":
        if self.quorum > self.sites:
            raise ValueError("sites.quorum exceeds sites.sites, so no round would close")
        return self
