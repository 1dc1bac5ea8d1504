"""The sections of a config: one model per process, and `Config`, which holds them all and checks them together.

Defaults are INTELLECT-2's recipe; `configs/` holds what fits a laptop. The recipe itself (tasks, sampling, loss) is in
`recipe`; how a file becomes a `Config` is in `loading`.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from shoal.config.recipe import LearnerSection, ModelSection, SamplingSection, Section, SftSection, TaskSection

Cheat = Literal["older_weights", "quantized_weights", "forged_reward", "wrong_temperature", "replayed_submission"]

TrackerName = Literal["none", "wandb", "tensorboard", "trackio"]


def _as_list(value: object) -> object:
    """One lie may be written without brackets."""
    return [value] if isinstance(value, str) and value else value or []


class RunSection(Section):
    seed: int = Field(default=0, ge=0)
    steps: int = Field(default=100, ge=1, description="rollout steps to train")
    max_restarts: int = Field(default=5, ge=0, description="of one process by `shoal run` before it gives up")
    tracker: TrackerName = Field(default="none", description="also sends the metrics there; see docs/metrics.md")
    threads: int = Field(default=0, ge=0, description="cores to share out; 0: all that this process may use")
    no_signal_groups: int = Field(
        default=512, ge=1, description="accepted groups in a row with equal rewards, after which the run is stopped"
    )
    stall_s: float = Field(
        default=900, gt=0, description="without an accepted submission or a trained step, the run is stopped"
    )


class CoordinatorSection(Section):
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0: a free one")
    async_level: int = Field(
        default=2, ge=0, description="how many policy versions old a rollout may be when trained on"
    )
    prompts_per_step: int = Field(default=256, ge=1, description="groups in a batch")
    online_filter: bool = Field(
        default=True,
        description="batches of groups whose rewards differ; false: of all, though the others teach nothing",
    )
    task_deadline_s: float = Field(default=600, gt=0, description="from handing out a task to its upload")
    claim_lease_s: float = Field(default=300, gt=0, description="for a validator's verdict")
    max_submission_bytes: int = Field(default=64 << 20, ge=1024)
    node_timeout_s: float = Field(default=30, gt=0, description="without a heartbeat, a node counts as gone")


class OriginSection(Section):
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    shard_bytes: int | None = Field(default=None, ge=1024, description="none: a 256th of a version, 64 KiB to 16 MiB")
    anchor_every: int = Field(default=10, ge=1, description="versions between two that can be fetched whole")
    keep: int = Field(default=5, ge=1, description="newest versions served, with what they are deltas of")
    quota_bytes: int | None = Field(default=None, ge=1, description="of disk; fewer versions are kept where it binds")


class RelaySection(Section):
    """Also for the origin: who may read, and how much."""

    public: bool = Field(default=False, description="serve weights to anyone, not to this run's nodes alone")
    rate_bytes_per_s: float | None = Field(default=None, gt=0, description="for each reader; none: no limit")
    connections: int = Field(default=64, ge=1, description="at once from one address")
    tls_cert: str = Field(default="", description="certificate (chain) in PEM: serve https")
    tls_key: str = Field(default="", description="its private key")
    tls_ca: str = Field(default="", description="PEM of whom readers trust (empty: the system's authorities)")
    count: int = Field(default=1, ge=1, description="local relays `shoal run` starts")
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    keep: int = Field(default=5, ge=1)
    quota_bytes: int | None = Field(default=None, ge=1)


class WorkerSection(Section):
    count: int = Field(default=2, ge=1, description="local workers `shoal run` starts")
    groups_per_submission: int = Field(default=4, ge=1)
    cheat: Annotated[list[Cheat], BeforeValidator(_as_list)] = Field(
        default=[], description="for each, one more worker, which lies in this way (for tests and demonstrations)"
    )


class ValidatorSection(Section):
    count: int = Field(default=1, ge=1, description="local validators `shoal run` starts")
    row_tokens: int = Field(
        default=4096, ge=16, description="positions in one row of the prefill; more where one rollout needs more"
    )
    proof_exponent_mean: float = Field(default=10.0, gt=0, description="differing exponents a proof, over a submission")
    proof_mantissa_mean: float = Field(default=2.4, gt=0, description="mantissa error, likewise")
    logprob_error_mean: float = Field(default=0.1, gt=0, description="nats, over a submission's tokens")
    sampling_margin: float = Field(default=0.75, gt=0, description="nats a token may score under its seed's winner")
    sampling_mismatch_frac: float = Field(default=0.001, ge=0, description="share of tokens beyond that margin")
    sampling_mismatches: int = Field(
        default=2, ge=0, description="and so many more in any submission, for rare outliers"
    )
    sampling_margin_mean: float = Field(default=0.02, gt=0, description="nats, over a submission's tokens")
    eos_probability: float = Field(default=0.1, ge=0, le=1)
    distribution_evidence: float = Field(
        default=16.0,
        gt=0,
        description="nats for other sampling; by chance at most e^-16 of honest submissions have more",
    )
    batch: int = Field(default=4, ge=1, description="submissions of one version prefilled together")
    check_floor: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="least share of a trusted worker's submissions that are prefilled; 1: all. Where it is less, the"
        " others' logprobs are the worker's own claim",
    )
    trust_after: int = Field(default=32, ge=1, description="submissions found honest, in a row, that halve the share")


class EvaluatorSection(Section):
    every: int = Field(
        default=0, ge=0, description="versions between evaluations during the run; 0: only first and last"
    )
    n: int = Field(default=256, ge=1, description="held-out tasks of the first and last evaluation")
    n_between: int = Field(default=64, ge=1)
    batch: int = Field(default=64, ge=1, description="completions decoded together")


class Config(Section):
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    tasks: TaskSection = TaskSection()
    sampling: SamplingSection = SamplingSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    learner: LearnerSection = LearnerSection()
    origin: OriginSection = OriginSection()
    relays: RelaySection = RelaySection()
    workers: WorkerSection = WorkerSection()
    validator: ValidatorSection = ValidatorSection()
    evaluator: EvaluatorSection = EvaluatorSection()
    sft: SftSection = SftSection()

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
        if self.sampling.max_tokens >= self.learner.row_tokens:
            raise ValueError("learner.row_tokens must exceed sampling.max_tokens (a row holds prompt and completion)")
        return self
