"""`Config`: a run's whole config, with sections that are checked against each other."""

from collections.abc import Iterator
from typing import Literal

from pydantic import model_validator

from shoal.config.recipe import LearnerSection, ModelSection, SamplingSection, SftSection
from shoal.config.section import Section
from shoal.config.sections import (
    CoordinatorSection,
    EvaluatorSection,
    EvidenceSection,
    LedgerSection,
    OriginSection,
    RelaySection,
    RequirementsSection,
    RunSection,
    StoreSection,
    ValidatorSection,
    WorkerSection,
)
from shoal.config.sites import PretrainSection, SitesSection
from shoal.config.tasks import TaskSection

PROMPT_TOKENS = 8192  # default space for the prompt in a row, in addition to the longest completion
TURNS = 4  # default of sampling.max_turns if a source has an environment
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SUBMISSION_BYTES = 64 << 20  # lower bound of `max_submission_bytes`
TOKEN_BYTES = 18  # per token of a rollout file: id, logprob and 1/32 of a proof
ROLLOUT_BYTES = 512  # per row, for everything else
FILE_BYTES = 64 << 10  # per submission, for its header and footer, which take about 2 KiB


class Config(Section):
    """The config of a run: one section per process, and the learning recipe."""

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
        """`relays.reach`. With auto, it is local if the coordinator listens on loopback, else public."""
        if self.relays.reach != "auto":
            return self.relays.reach
        return "local" if self.coordinator.host in LOOPBACK else "public"

    @property
    def group_bytes(self) -> int:
        """The maximum size of a group in a rollout file."""
        return self.sampling.group_size * (self.sampling.max_tokens * TOKEN_BYTES + ROLLOUT_BYTES)

    @property
    def max_submission_bytes(self) -> int:
        """The maximum size of a rollout file: enough for any submission of `workers.groups_per_submission`."""
        return max(SUBMISSION_BYTES, self.workers.groups_per_submission * self.group_bytes)

    def submission_bytes(self, groups: int) -> int:
        """Return the maximum size of a submission of this many groups."""
        return min(FILE_BYTES + groups * self.group_bytes, self.max_submission_bytes)

    @model_validator(mode="after")
    def _derive(self) -> "Config":
        """Derive defaults of other fields from the fields that the config sets."""
        tasks, evaluator, learner, prompts = self.tasks, self.evaluator, self.learner, self.coordinator.prompts_per_step
        if "heldout" in tasks.model_fields_set:
            self._default("evaluator", n=min(evaluator.n, tasks.heldout))
        else:
            self._default("tasks", heldout=max(tasks.heldout, evaluator.n))
        if prompts % learner.optimizer_steps_per_step:
            divisors = [n for n in range(1, min(learner.optimizer_steps_per_step, 1025)) if prompts % n == 0]
            self._default("learner", optimizer_steps_per_step=divisors[-1])
        if self.sampling.max_tokens >= learner.row_tokens:
            self._default("learner", row_tokens=self.sampling.max_tokens + PROMPT_TOKENS)
        if any(source.environment for source in tasks.sources):
            self._default("sampling", max_turns=max(self.sampling.max_turns, TURNS))
        if learner.sites:
            self._default("sites", sites=learner.sites)
            self._default("sites", kind="bf16")  # because a step's small changes are below fp16's range
            self._default("sites", lr=1.0)
            self._default("sites", momentum=0.0)
            self._default("sites", wait_s=300.0)
        return self

    def _default(self, name: str, **values: int | float | str) -> None:
        """Set fields of the section `name`, unless the config sets them."""
        section: Section = getattr(self, name)
        if not section.model_fields_set & values.keys():
            self.__dict__[name] = section.model_copy(update=values)  # setattr fails, because the model is frozen

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if faults := list(self._faults()):
            raise ValueError("; ".join(faults))
        return self

    def _faults(self) -> Iterator[str]:
        """Yield each contradiction between sections."""
        tasks, evaluator, learner = self.tasks, self.evaluator, self.learner
        if evaluator.n > tasks.heldout:
            yield f"evaluator.n = {evaluator.n} exceeds tasks.heldout = {tasks.heldout}"
        if self.coordinator.prompts_per_step % learner.optimizer_steps_per_step:
            yield "coordinator.prompts_per_step must be a multiple of learner.optimizer_steps_per_step"
        if learner.sites and self.coordinator.prompts_per_step < learner.sites:
            yield "coordinator.prompts_per_step is below learner.sites, so a site would have no group"
        if (longest := max(tasks.length_targets, default=0)) > self.sampling.max_tokens:
            yield f"tasks.length_targets asks for {longest} tokens, but sampling.max_tokens = {self.sampling.max_tokens}"
        if self.sampling.max_tokens >= learner.row_tokens:
            yield "learner.row_tokens must exceed sampling.max_tokens (a row holds prompt and completion)"
        if list(self.evidence.rates) != sorted(self.evidence.rates, reverse=True):
            yield "evidence.rates increase, but a larger margin is never more frequent"
        for figure in ("proof_exponent_mean", "proof_mantissa_mean", "logprob_error_mean"):
            honest = getattr(self.evidence, figure)
            if honest is not None and honest < 0.01 * self.validator.widest(figure):
                yield f"evidence.{figure} is below 1 % of validator.{figure}, so honest work would be dismissed"
        with_environment = [source.label for source in tasks.sources if source.environment]
        if with_environment and self.sampling.max_turns == 1:
            yield f"the source {with_environment[0]} has an environment, which needs sampling.max_turns of at least 2"
        if not with_environment and self.sampling.max_turns > 1:
            yield (
                f"sampling.max_turns = {self.sampling.max_turns} needs a source with an environment "
                '(environment = "calculator" in [[tasks.sources]])'
            )
