"""The sections of a config: one model per process, and `Config`, which holds and cross-checks all of them.

Defaults with the source INTELLECT-2 are that paper's, all others Shoal's own; `configs/` holds settings that fit a laptop.
`recipe` holds tasks, sampling and loss.
"""

from typing import Annotated, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from shoal.config.recipe import (
    MEASURED,
    PAPER,
    LearnerSection,
    ModelSection,
    SamplingSection,
    SftSection,
    TaskSection,
)
from shoal.config.section import Section
from shoal.config.sites import PretrainSection, SitesSection

Cheat = Literal[
    "older_weights",
    "quantized_weights",
    "forged_reward",
    "wrong_temperature",
    "replayed_submission",
    "forged_tool",
    "faked_fingerprint",
]

EngineName = Literal["torch", "vllm"]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
TrackerName = Literal["none", "wandb", "tensorboard", "trackio"]


RATES = (0.1, 0.03, 2e-3, 1e-3)  # until they are measured: wider than all honest machines measured so far


def _as_list(value: object) -> object:
    """A single cheat may be written without brackets."""
    return [value] if isinstance(value, str) and value else value or []


class RunSection(Section):
    """The run as a whole."""

    seed: int = Field(default=0, ge=0, description="seed of the run; another seed draws other tasks and completions")
    steps: int = Field(default=100, ge=1, description="rollout steps to train")
    max_restarts: int = Field(default=5, ge=0, description="restarts of one process before `shoal run` gives up")
    tracker: TrackerName = Field(default="none", description="experiment tracker that also gets the metrics")
    threads: int = Field(default=0, ge=0, description="cores to share among the processes; 0: all available ones")
    no_signal_groups: int = Field(
        default=512, ge=1, description="accepted groups in a row with equal rewards after which `shoal run` stops"
    )
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
    """Where stakes are kept. The log of the pool's work is always in the coordinator's database."""

    backend: Literal["database", "evm"] = Field(
        default="database",
        description="database: the operator books stakes (`shoal stake book`); evm: a contract holds them, and what the "
        "ledger says of accounts is repeated there",
    )
    rpc: str = Field(
        default="",
        pattern=r"^(https?://[^\s#@]+)?$",
        description="URL of the chain's node; only the coordinator sees it",
    )
    contract: str = Field(
        default="", pattern="^(0x[0-9a-fA-F]{40})?$", description="its address; `shoal stake deploy` makes one"
    )
    key_file: str = Field(
        default="",
        description="file of the private key of the contract's operator, in hex, on the coordinator's machine; empty: the "
        "chain's node signs with its own first account",
    )

    @model_validator(mode="after")
    def _named(self) -> "LedgerSection":
        if self.backend == "evm" and not self.contract:
            raise ValueError('backend = "evm" needs a contract: `shoal stake deploy` makes one')
        return self


class OriginSection(Section):
    """The server that publishes the learner's weights."""

    host: str = Field(default="127.0.0.1", description="address to listen on and to announce to the pool")
    port: int = Field(default=0, ge=0, le=65535, description="port to listen on; 0: a free one")
    shard_bytes: int | None = Field(
        default=None, ge=1024, description="size of a shard; none: 1/256 of a version, between 64 KiB and 16 MiB"
    )
    anchor_every: int = Field(
        default=10, ge=1, description="every how many versions a full copy is published; the others are deltas"
    )
    keep: int = Field(default=5, ge=1, description="newest versions served, plus the versions their deltas need")
    quota_bytes: int | None = Field(
        default=None, ge=1, description="disk quota; fewer versions are kept when it is reached; none: no limit"
    )


class RelaySection(Section):
    """Mirrors of the origin. Reader limits and TLS also apply to the origin."""

    public: bool = Field(default=False, description="serve weights to anyone; false: only to nodes of this run")
    reach: Literal["auto", "local", "private", "public"] = Field(
        default="auto",
        description="addresses that relays may announce and nodes connect to: this machine's too, private networks' too, or "
        "only the internet's; auto: local if the coordinator listens on loopback, else public",
    )
    rate_bytes_per_s: float | None = Field(default=None, gt=0, description="bandwidth per reader; none: no limit")
    connections: int = Field(default=64, ge=1, description="simultaneous connections from one address")
    tls_cert: str = Field(default="", description="PEM file with the certificate chain; empty: plain http")
    tls_key: str = Field(default="", description="PEM file with the private key of tls_cert")
    tls_ca: str = Field(
        default="", description="PEM file of the authorities that readers trust; empty: the system's authorities"
    )
    count: int = Field(default=1, ge=1, description="relays that `shoal run` starts")
    host: str = Field(default="127.0.0.1", description="address to listen on and to announce to the pool")
    port: int = Field(default=0, ge=0, le=65535, description="port to listen on; 0: a free one")
    keep: int = Field(default=5, ge=1, description="newest versions held, plus the versions their deltas need")
    quota_bytes: int | None = Field(
        default=None, ge=1, description="disk quota; fewer versions are held when it is reached; none: no limit"
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
    cheat: Annotated[list[Cheat], BeforeValidator(_as_list)] = Field(
        default=[], description="cheating workers that `shoal run` adds, one per entry (for tests and demonstrations)"
    )

    def engine(self, number: int) -> EngineName:
        """What the worker of this number generates with."""
        return self.engines[number % len(self.engines)]

    @property
    def largest(self) -> int:
        """Groups in the largest submission."""
        return max(self.most_groups or 8 * self.groups_per_submission, self.groups_per_submission)


OF_ALL = "see [validator]; none: as there"


class EngineLimits(Section):
    """`[[validator.limits]]`: limits for the work of one engine on one kind of device. What is left out is as for all."""

    engine: EngineName = Field(default="vllm", description="the engine that a submission's signed header names")
    device: str = Field(default="cpu", description="and its device, such as cpu or cuda", pattern="^[a-z0-9]+$")
    proof_exponent_mean: float | None = Field(default=None, gt=0, description=OF_ALL, json_schema_extra=MEASURED)
    proof_mantissa_mean: float | None = Field(default=None, gt=0, description=OF_ALL, json_schema_extra=MEASURED)
    logprob_error_mean: float | None = Field(default=None, gt=0, description=OF_ALL, json_schema_extra=MEASURED)
    sampling_margin: float | None = Field(default=None, gt=0, description=OF_ALL, json_schema_extra=MEASURED)
    sampling_mismatch_frac: float | None = Field(default=None, ge=0, description=OF_ALL, json_schema_extra=MEASURED)
    sampling_mismatches: int | None = Field(default=None, ge=0, description=OF_ALL, json_schema_extra=MEASURED)
    sampling_margin_mean: float | None = Field(default=None, gt=0, description=OF_ALL, json_schema_extra=MEASURED)


class ValidatorSection(Section):
    """The limits that submissions must meet. `shoal calibrate` measures them."""

    count: int = Field(default=1, ge=1, description="validators that `shoal run` starts")
    limits: list[EngineLimits] = []
    row_tokens: int = Field(
        default=4096, ge=16, description="positions in one row of the prefill; a longer rollout gets a longer row"
    )
    proof_exponent_mean: float = Field(
        default=10.0,
        gt=0,
        description="largest mean number of differing exponents per proof, over a submission",
        json_schema_extra=MEASURED,
    )
    proof_mantissa_mean: float = Field(
        default=2.4,
        gt=0,
        description="largest mean mantissa error per proof, over a submission",
        json_schema_extra=MEASURED,
    )
    logprob_error_mean: float = Field(
        default=0.1,
        gt=0,
        description="largest mean logprob error in nats, over a submission's tokens",
        json_schema_extra=MEASURED,
    )
    sampling_margin: float = Field(
        default=0.75,
        gt=0,
        description="nats by which a token may score below the token its seed selects; further is a mismatch",
        json_schema_extra=MEASURED,
    )
    sampling_mismatch_frac: float = Field(
        default=0.001,
        ge=0,
        description="largest share of mismatches among a submission's tokens",
        json_schema_extra=MEASURED,
    )
    sampling_mismatches: int = Field(
        default=2, ge=0, description="extra mismatches always allowed per submission", json_schema_extra=MEASURED
    )
    sampling_margin_mean: float = Field(
        default=0.02,
        gt=0,
        description="largest mean margin in nats, over a submission's tokens; one beyond `sampling_margin` counts as 0",
        json_schema_extra=MEASURED,
    )
    eos_probability: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="a completion may end early only where the end token's probability exceeds this",
        json_schema_extra=PAPER,
    )
    distribution_evidence: float = Field(
        default=16.0,
        gt=0,
        description="nats of evidence for other sampling that reject a submission; an honest one exceeds x with "
        "probability at most e^-x",
    )
    classes: Literal["any", "exact"] = Field(
        default="any",
        description="whose work is taken; any: also of machines that compute unlike every validator, within the limits; "
        "exact: only what a validator computes to the last bit, so tasks go only to workers of a live validator's class",
    )
    batch: int = Field(default=4, ge=1, description="submissions of one version checked in one prefill")
    check_floor: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="smallest share of a trusted worker's submissions that are prefilled whole; 1: all. Of the others "
        "`spot_rollouts` are",
    )
    trust_after: int = Field(
        default=32, ge=1, description="honest submissions in a row that halve the share that is prefilled"
    )
    spot_rollouts: int = Field(
        default=2,
        ge=1,
        description="rollouts, drawn after upload, that are prefilled of a submission that is not whole",
    )
    unchecked_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="largest share of a batch's groups from submissions that were not prefilled whole; when enough of them "
        "wait, every submission is",
    )
    escrow_checks: int = Field(
        default=16,
        ge=1,
        description="whole prefills that a worker must pass after a submission before it is credited; rejected lies take "
        "the credit that waits. At least 1 / check_floor",
    )

    def of(self, engine: str) -> "ValidatorSection":
        """As for submissions of this ENGINE/DEVICE: its own limits, where it has some."""
        own = next((one for one in self.limits if engine == f"{one.engine}/{one.device}"), None)
        if own is None:
            return self
        return self.model_copy(update=own.model_dump(exclude={"engine", "device"}, exclude_none=True))


class EvidenceSection(Section):
    """Tests over all submissions of a worker, where one check leaves tolerance. The bounds are of measured honest work."""

    alpha: float = Field(
        default=1e-6,
        gt=0,
        lt=1,
        description="probability at most that the tests ever find an honest worker, whatever it submits and for how long",
    )
    rates: tuple[float, float, float, float] = Field(
        default=RATES,
        description="honest tokens that miss their seeds' by more than 0, 1/8, 1/2 and 1 times validator.sampling_margin, "
        "for each token that numerics could move",
        json_schema_extra=MEASURED,
    )
    reward_tilt: float = Field(
        default=2.0,
        ge=1,
        description="how much likelier numerics may move a token of one completion than of another of its group",
    )
    task_tilt: float = Field(default=4.0, ge=1, description="the same between groups of one submission")
    regenerated: int = Field(
        default=0,
        ge=0,
        description="rollouts of a submission that a validator generates again, of those with a token that is not their "
        "seed's, to see whether the worker chose for the reward",
    )
    proof_exponent_mean: float | None = Field(
        default=None,
        gt=0,
        description="honest average of the figure that validator.proof_exponent_mean limits; none: 2/3 of the limit",
        json_schema_extra=MEASURED,
    )
    proof_mantissa_mean: float | None = Field(
        default=None, gt=0, description="likewise; none: 2/3 of the limit", json_schema_extra=MEASURED
    )
    logprob_error_mean: float | None = Field(
        default=None, gt=0, description="likewise; none: 2/3 of the limit", json_schema_extra=MEASURED
    )


class RequirementsSection(Section):
    """What a machine must have to get tasks of this run. All but speed is its own report; speed is measured."""

    memory_gib: float = Field(default=0, ge=0, description="memory of a worker's machine in GiB, as it reports")
    tokens_per_s: float = Field(
        default=0,
        ge=0,
        description="tokens per second from task to upload, measured over a worker's accepted work; 0: any",
    )
    engines: list[str] = Field(default=[], description='engines that may generate, such as "torch"; empty: any')
    devices: list[str] = Field(default=[], description='devices of workers, such as "cpu" or "cuda"; empty: any')
    stake: int = Field(
        default=0,
        ge=0,
        description="what a stranger must have staked to join with an open invite, in the ledger's unit",
    )
    places: int = Field(default=0, ge=0, description="live workers at once; no more may join; 0: any number")


class EvaluatorSection(Section):
    """Held-out accuracy of published versions."""

    every: int = Field(
        default=0, ge=0, description="versions between evaluations during the run; 0: only the first and last version"
    )
    n: int = Field(default=256, ge=1, description="held-out tasks of the first and last evaluation")
    n_between: int = Field(default=64, ge=1, description="held-out tasks of the evaluations between them")
    batch: int = Field(default=64, ge=1, description="completions decoded together")


class Config(Section):
    """A run: one section per process, and the learning recipe."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    tasks: TaskSection = TaskSection()
    sampling: SamplingSection = SamplingSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    store: StoreSection = StoreSection()
    ledger: LedgerSection = LedgerSection()
    learner: LearnerSection = LearnerSection()
    origin: OriginSection = OriginSection()
    relays: RelaySection = RelaySection()
    workers: WorkerSection = WorkerSection()
    validator: ValidatorSection = ValidatorSection()
    evidence: EvidenceSection = EvidenceSection()
    requirements: RequirementsSection = RequirementsSection()
    evaluator: EvaluatorSection = EvaluatorSection()
    sft: SftSection = SftSection()
    pretrain: PretrainSection = PretrainSection()
    sites: SitesSection = SitesSection()

    @property
    def reach(self) -> Literal["local", "private", "public"]:
        """`relays.reach`, or what follows from where the coordinator listens."""
        if self.relays.reach != "auto":
            return self.relays.reach
        return "local" if self.coordinator.host in LOOPBACK else "public"

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.evaluator.n > self.tasks.heldout:
            raise ValueError(f"evaluator.n = {self.evaluator.n} exceeds tasks.heldout = {self.tasks.heldout}")
        if self.evaluator.every and self.evaluator.n_between > self.tasks.heldout:
            raise ValueError(
                f"evaluator.n_between = {self.evaluator.n_between} exceeds tasks.heldout = {self.tasks.heldout}"
            )
        if self.coordinator.prompts_per_step % self.learner.optimizer_steps_per_step:
            raise ValueError("coordinator.prompts_per_step must be a multiple of learner.optimizer_steps_per_step")
        if self.learner.sites and self.learner.stream:
            raise ValueError(
                "learner.stream is for a learner at one site: a site's share is known once the batch is full"
            )
        if self.learner.sites and self.coordinator.prompts_per_step < self.learner.sites.sites:
            raise ValueError("coordinator.prompts_per_step is below learner.sites.sites: a site would have no group")
        if self.sampling.max_tokens >= self.learner.row_tokens:
            raise ValueError("learner.row_tokens must exceed sampling.max_tokens (a row holds prompt and completion)")
        if self.validator.escrow_checks * self.validator.check_floor < 1:
            raise ValueError(
                f"validator.escrow_checks = {self.validator.escrow_checks} is below 1 / validator.check_floor "
                f"({1 / self.validator.check_floor:.4g}): lies would pay (docs/trust.md); raise one of the two"
            )
        answered = [source.label for source in self.tasks.sources if source.environment]
        if answered and self.sampling.max_turns == 1:
            raise ValueError(
                f"the source {answered[0]} has an environment, which needs sampling.max_turns of at least 2"
            )
        if not answered and self.sampling.max_turns > 1:
            raise ValueError(
                f"sampling.max_turns = {self.sampling.max_turns} needs a source with an environment "
                '(environment = "calculator" in [[tasks.sources]])'
            )
        if not answered and "forged_tool" in self.workers.cheat:
            raise ValueError('workers.cheat = "forged_tool" needs a source with an environment')
        return self
