"""`Config`: a run's whole config, one section per process and the learning recipe, checked against each other.

Called by `loading`, which reads it from a file, and by everything that needs a setting.
"""

from typing import Literal

from pydantic import model_validator

from shoal.config.checking import EvidenceSection, RequirementsSection, ValidatorSection
from shoal.config.recipe import LearnerSection, ModelSection, SamplingSection, SftSection
from shoal.config.section import Section
from shoal.config.sections import (
    CoordinatorSection,
    EvaluatorSection,
    LedgerSection,
    OriginSection,
    RelaySection,
    RunSection,
    StoreSection,
    WorkerSection,
)
from shoal.config.sites import PretrainSection, SitesSection
from shoal.config.tasks import TaskSection

LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
        if self.learner.offload and self.model.device == "cpu":
            raise ValueError(
                'learner.offload moves masters and moments from a device to its host, and model.device = "cpu" has them '
                "there: remove it, or set model.device"
            )
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
