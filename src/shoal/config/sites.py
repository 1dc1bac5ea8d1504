"""The sections of pretraining and of several sites. Defaults are DiLoCo's (arXiv 2311.08105, table 5) where it has one."""

from typing import Any, Literal

from pydantic import Field, model_validator

from shoal.config.section import DILOCO, OPENDILOCO, Section

Numbers = Literal["fp64", "fp32", "fp16", "bf16", "int8", "int4"]  # on the wire


class PretrainSection(Section):
    """Training on plain text, `shoal pretrain`."""

    data: str = Field(
        default="",
        description="files of text: a path, a pattern with *, or ORGANISATION/NAME:PATTERN for a data set on the Hugging "
        "Face hub; .jsonl, .json (one object a line, also with .gz), .parquet or .txt",
    )
    field: str = Field(default="text", description="the field or column that holds the text")
    init: Literal["random", "weights"] = Field(
        default="random", description="start from random weights drawn with run.seed, or from those of model.name"
    )
    steps: int = Field(default=88000, ge=1, description="inner steps to train", json_schema_extra=DILOCO)
    batch: int = Field(
        default=512, ge=1, description="sequences per step and site, over all its ranks", json_schema_extra=DILOCO
    )
    micro_batch: int = Field(default=8, ge=1, description="sequences computed at once")
    tokens: int = Field(default=1024, ge=2, description="tokens of a sequence", json_schema_extra=DILOCO)
    lr: float = Field(default=4e-4, gt=0, description="largest AdamW learning rate", json_schema_extra=DILOCO)
    final_lr: float = Field(default=0.0, ge=0, description="learning rate at the last step, reached along a cosine")
    warmup_steps: int = Field(default=1000, ge=0, description="steps of linear warm-up", json_schema_extra=DILOCO)
    heldout: int = Field(default=64, ge=0, description="documents at the start of the data that are held out")
    checkpoint_every: int = Field(
        default=500, ge=1, description="steps between checkpoints, and between measurements of the held-out loss"
    )
    share: int = Field(default=256, ge=1, description="documents of a share, which one site reads")


class SitesSection(Section):
    """Several sites that train one model: with [pretrain], or as a run's learner (`learner.sites`).

    They meet once in `inner_steps`; the learner's sites meet once a step. The outer step of the learner's sites follows
    `learner.sites` where it is not set: bf16 numbers, rate 1 and no momentum, which is the average; 300 seconds to wait.
    """

    sites: int = Field(default=2, ge=1, description="sites that the first round waits for, and invites that are made")
    inner_steps: int = Field(
        default=500, ge=1, description="inner steps between two meetings of a fragment", json_schema_extra=DILOCO
    )
    fragments: int = Field(default=1, ge=1, description="parts of the parameters that travel in turn; 1: all at once")
    delay: int = Field(
        default=0,
        ge=0,
        description="inner steps that a site makes while a round's result travels; 0: it waits",
    )
    keep: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of its own parameters that a site keeps after a round; Streaming DiLoCo has 0.5",
    )
    kind: Numbers = Field(default="fp16", description="numbers on the wire", json_schema_extra=OPENDILOCO)
    lr: float = Field(default=0.7, gt=0, description="learning rate of the outer step", json_schema_extra=DILOCO)
    momentum: float = Field(
        default=0.9, ge=0, lt=1, description="Nesterov momentum of the outer step", json_schema_extra=DILOCO
    )
    quorum: int = Field(default=1, ge=1, description="fewest sites whose offers close a round")
    wait_s: float = Field(default=60, gt=0, description="seconds from a round's first offer until it closes")
    give_up_s: float = Field(
        default=900, gt=0, description="seconds a site waits for a round, or for a meeting that does not answer"
    )
    host: str = Field(default="127.0.0.1", description="address that the meeting listens on; 0.0.0.0: all")
    port: int = Field(default=0, ge=0, le=65535, description="port that the meeting listens on; 0: a free one")
    url: str = Field(
        default="", description="where sites reach the meeting, such as a proxy with TLS; empty: where it listens"
    )

    @property
    def terms(self) -> dict[str, Any]:
        """What sites and meeting must know of a round."""
        return self.model_dump(include={"kind", "lr", "momentum", "wait_s", "quorum", "sites"})

    @property
    def round_steps(self) -> int:
        """Inner steps from one round to the next; each is about one fragment."""
        return self.inner_steps // self.fragments

    @model_validator(mode="after")
    def _consistent(self) -> "SitesSection":
        if self.quorum > self.sites:
            raise ValueError("sites.quorum exceeds sites.sites, so no round would close")
        if self.inner_steps % self.fragments:
            raise ValueError("sites.inner_steps must be a multiple of sites.fragments")
        if self.delay >= self.round_steps:
            raise ValueError(
                f"sites.delay must be below sites.inner_steps / sites.fragments = {self.round_steps}: "
                "a round's result is used before the next round"
            )
        return self
