"""The settings of each process: coordinator, store, ledger, origin, relays, workers, evaluator, and the run as a whole.

Defaults with the source INTELLECT-2 are that paper's, all others Shoal's own; `configs/` holds settings that fit a laptop.
`checking` holds what work and machines must meet, `recipe` the learning.
"""

from typing import Annotated, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from shoal.config.section import Listen, Listening, Section

EngineName = Literal["torch", "vllm"]
TrackerName = Literal["none", "wandb", "tensorboard"]


class RunSection(Section):
    """The run as a whole."""

    seed: NonNegativeInt = 0
    """Seed of the run; another seed draws other tasks and completions."""
    steps: PositiveInt = 100
    """Rollout steps to train."""
    tracker: TrackerName = "none"
    """Experiment tracker that also gets the metrics."""


class CoordinatorSection(Listening):
    """The pool's control plane."""

    listen: Listen = "127.0.0.1:0"
    """HOST:PORT to listen on; host 0.0.0.0: all interfaces; port 0: a free one."""
    async_level: NonNegativeInt = 2
    """How many policy versions old a rollout may be when it is trained on (INTELLECT-2)."""
    prompts_per_step: PositiveInt = 256
    """Groups in a batch (INTELLECT-2)."""
    online_filter: bool = True
    """Leave groups with equal rewards out of batches: they teach nothing (INTELLECT-2)."""
    database: str = ""
    """postgresql://USER@HOST/NAME, without a password (PGPASSWORD or ~/.pgpass has it); empty: SQLite."""

    @field_validator("database")
    @classmethod
    def _postgres_without_password(cls, url: str) -> str:
        parts = urlsplit(url)
        if url and parts.scheme not in ("postgresql", "postgres"):
            raise ValueError("a database is named postgresql://USER@HOST/NAME; leave it empty for SQLite")
        if parts.password or "password" in parse_qs(parts.query):
            raise ValueError("leave the password out: set PGPASSWORD or write ~/.pgpass where the coordinator runs")
        return url


class StoreSection(Section):
    """Where rollout files are kept. The bucket's credentials are in the coordinator's environment, never here."""

    url: Annotated[str, Field(pattern=r"^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._/-]*)?)?$")] = ""
    """s3://BUCKET/PREFIX; nodes send and fetch files there by signed URLs; empty: the coordinator's folder."""
    endpoint: Annotated[str, Field(pattern=r"^(https?://[^/?#@]+)?$")] = ""
    """Where the bucket's S3 server is, as nodes reach it; empty: AWS."""


class LedgerSection(Section):
    """Where stakes are kept. The log of the pool's work is always in the coordinator's database.

    Without a contract the operator books stakes (`shoal pool stake book`); a contract holds them itself, and what the ledger
    says of accounts is repeated there.
    """

    rpc: Annotated[str, Field(pattern=r"^(https?://[^\s#@]+)?$")] = ""
    """URL of the chain's node; only the coordinator sees it."""
    contract: Annotated[str, Field(pattern="^(0x[0-9a-fA-F]{40})?$")] = ""
    """Its address on the chain, which `shoal pool stake deploy` prints; empty: no chain."""
    key_file: str = ""
    """File of the private key of the contract's operator, in hex, on the coordinator's machine; empty: the chain's node
    signs with its own first account."""


class OriginSection(Listening):
    """The server that publishes the learner's weights."""

    listen: Listen = "127.0.0.1:0"
    """HOST:PORT to listen on and to announce to the pool; port 0: a free one."""


class RelaySection(Listening):
    """Mirrors of the origin."""

    reach: Literal["auto", "local", "private", "public"] = "auto"
    """Addresses that relays may announce and nodes connect to: this machine's too, private networks' too, or only the
    internet's; auto: local if the coordinator listens on loopback, else public."""
    count: PositiveInt = 1
    """Relays that `shoal run` starts."""
    listen: Listen = "127.0.0.1:0"
    """HOST:PORT to listen on and to announce to the pool; port 0: a free one."""


class WorkerSection(Section):
    """The machines that generate rollouts."""

    count: PositiveInt = 2
    """Workers that `shoal run` starts."""
    engines: Annotated[list[EngineName], Field(min_length=1)] = ["torch"]
    """What they generate with, in turn, and what `shoal calibrate` measures; vllm needs an environment of its own
    (docs/vllm.md)."""
    groups_per_submission: PositiveInt = 4
    """Groups in one submission of a newcomer, and of a worker as fast as most."""
    in_flight: Annotated[int, Field(ge=1, le=16)] = 1
    """Submissions that a worker may generate at once, so that its batch stays full while the longest completions of one
    end."""

    def engine(self, number: int) -> EngineName:
        """What the worker of this number generates with."""
        return self.engines[number % len(self.engines)]

    @property
    def largest(self) -> int:
        """Groups in the largest submission, of a much faster worker."""
        return 8 * self.groups_per_submission


EVALUATED_AT_ONCE = 64  # completions that an evaluation asks its engine for together


class EvaluatorSection(Section):
    """Held-out accuracy of published versions."""

    every: NonNegativeInt = 0
    """Versions between evaluations during the run; 0: only the first and last version."""
    n: PositiveInt = 256
    """Held-out tasks of the first and last evaluation."""
