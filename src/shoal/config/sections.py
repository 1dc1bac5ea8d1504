"""The settings of each process: coordinator, store, ledger, origin, relays, workers, evaluator, and the run as a whole.

Defaults with the source INTELLECT-2 are that paper's, all others Shoal's own; `configs/` holds settings that fit a laptop.
`checking` holds what work and machines must meet, `recipe` the learning.
"""

from typing import Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, field_validator

from shoal.config.section import PAPER, Section

EngineName = Literal["torch", "vllm"]
TrackerName = Literal["none", "wandb", "tensorboard", "trackio"]


class RunSection(Section):
    """The run as a whole."""

    seed: int = Field(default=0, ge=0, description="seed of the run; another seed draws other tasks and completions")
    steps: int = Field(default=100, ge=1, description="rollout steps to train")
    tracker: TrackerName = Field(default="none", description="experiment tracker that also gets the metrics")
    threads: int = Field(default=0, ge=0, description="cores to share among the processes; 0: all available ones")
    stall_s: float = Field(
        default=900,
        gt=0,
        description="seconds without an accepted submission or a trained step after which `shoal run` stops",
    )


class CoordinatorSection(Section):
    """The pool's control plane."""

    host: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0: all interfaces")
    port: int = Field(default=0, ge=0, le=65535, description="port to listen on; 0: a free one")
    async_level: int = Field(
        default=2,
        ge=0,
        description="how many policy versions old a rollout may be when it is trained on",
        json_schema_extra=PAPER,
    )
    prompts_per_step: int = Field(default=256, ge=1, description="groups in a batch", json_schema_extra=PAPER)
    online_filter: bool = Field(
        default=True,
        description="leave groups with equal rewards out of batches: they teach nothing",
        json_schema_extra=PAPER,
    )
    task_deadline_s: float = Field(
        default=600,
        gt=0,
        description="seconds after which a worker that asks again gets another task instead of the one it holds",
    )
    claim_lease_s: float = Field(default=300, gt=0, description="seconds a validator has for a verdict")
    max_submission_bytes: int = Field(default=64 << 20, ge=1024, description="largest accepted submission")
    connections: int = Field(
        default=256,
        ge=1,
        description="simultaneous connections from one address; behind a proxy, all come from its own",
    )
    node_timeout_s: float = Field(
        default=30, gt=0, description="seconds without a heartbeat after which a node counts as gone"
    )
    database: str = Field(
        default="",
        description="postgresql://USER@HOST/NAME, without a password (PGPASSWORD or ~/.pgpass has it); empty: SQLite",
    )

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

    url: str = Field(
        default="",
        pattern=r"^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._/-]*)?)?$",
        description="s3://BUCKET/PREFIX; nodes send and fetch files there by signed URLs; empty: the coordinator's folder",
    )
    endpoint: str = Field(
        default="",
        pattern=r"^(https?://[^/?#@]+)?$",
        description="where the bucket's S3 server is, as nodes reach it; empty: AWS",
    )
    region: str = Field(default="us-east-1", description="of the bucket")


class LedgerSection(Section):
    """Where stakes are kept. The log of the pool's work is always in the coordinator's database.

    Without a contract the operator books stakes (`shoal pool stake book`); a contract holds them itself, and what the ledger
    says of accounts is repeated there.
    """

    rpc: str = Field(
        default="",
        pattern=r"^(https?://[^\s#@]+)?$",
        description="URL of the chain's node; only the coordinator sees it",
    )
    contract: str = Field(
        default="",
        pattern="^(0x[0-9a-fA-F]{40})?$",
        description="its address on the chain, which `shoal pool stake deploy` prints; empty: no chain",
    )
    key_file: str = Field(
        default="",
        description="file of the private key of the contract's operator, in hex, on the coordinator's machine; empty: the "
        "chain's node signs with its own first account",
    )


class OriginSection(Section):
    """The server that publishes the learner's weights."""

    host: str = Field(default="127.0.0.1", description="address to listen on and to announce to the pool")
    port: int = Field(default=0, ge=0, le=65535, description="port to listen on; 0: a free one")


class RelaySection(Section):
    """Mirrors of the origin. Who may read, TLS and `keep` also apply to the origin."""

    public: bool = Field(default=False, description="serve weights to anyone; false: only to nodes of this run")
    reach: Literal["auto", "local", "private", "public"] = Field(
        default="auto",
        description="addresses that relays may announce and nodes connect to: this machine's too, private networks' too, or "
        "only the internet's; auto: local if the coordinator listens on loopback, else public",
    )
    tls_cert: str = Field(default="", description="PEM file with the certificate chain; empty: plain http")
    tls_key: str = Field(default="", description="PEM file with the private key of tls_cert")
    tls_ca: str = Field(
        default="", description="PEM file of the authorities that readers trust; empty: the system's authorities"
    )
    count: int = Field(default=1, ge=1, description="relays that `shoal run` starts")
    host: str = Field(default="127.0.0.1", description="address to listen on and to announce to the pool")
    port: int = Field(default=0, ge=0, le=65535, description="port to listen on; 0: a free one")
    keep: int = Field(
        default=5, ge=1, description="newest versions that origin and relays hold, plus the versions their deltas need"
    )


class WorkerSection(Section):
    """The machines that generate rollouts."""

    count: int = Field(default=2, ge=1, description="workers that `shoal run` starts")
    engines: list[EngineName] = Field(
        default=["torch"],
        min_length=1,
        description="what they generate with, in turn, and what `shoal calibrate` measures; vllm needs an environment of "
        "its own (docs/vllm.md)",
    )
    groups_per_submission: int = Field(
        default=4, ge=1, description="groups in one submission of a newcomer, and of a worker as fast as most"
    )
    most_groups: int | None = Field(
        default=None,
        ge=1,
        description="groups in the largest submission, of a much faster worker; none: 8 times groups_per_submission",
    )
    in_flight: int = Field(
        default=1,
        ge=1,
        le=16,
        description="submissions that a worker may generate at once, so that its batch stays full while the longest "
        "completions of one end",
    )

    def engine(self, number: int) -> EngineName:
        """What the worker of this number generates with."""
        return self.engines[number % len(self.engines)]

    @property
    def largest(self) -> int:
        """Groups in the largest submission."""
        return max(self.most_groups or 8 * self.groups_per_submission, self.groups_per_submission)


class EvaluatorSection(Section):
    """Held-out accuracy of published versions."""

    every: int = Field(
        default=0, ge=0, description="versions between evaluations during the run; 0: only the first and last version"
    )
    n: int = Field(default=256, ge=1, description="held-out tasks of the first and last evaluation")
    batch: int = Field(default=64, ge=1, description="completions decoded together")
