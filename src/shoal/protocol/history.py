"""The history of a run as a reader collects it: metrics of each step, evaluations, and the newest sample completions.

Invariant: a step or evaluation that is reported again replaces the earlier report. Called by the view, the report and the
record, with what `GET /v1/history` answers.
"""

from dataclasses import dataclass, field

from shoal.protocol.messages import Evaluation, History, WorkerSample

MAX_SAMPLES = 512  # the newest are kept


@dataclass
class RunHistory:
    cursor: int = 0
    metrics: list[dict[str, float]] = field(default_factory=list)  # one per trained step, in order
    evaluations: list[Evaluation] = field(default_factory=list)  # by version, the final one last
    samples: list[WorkerSample] = field(default_factory=list)  # oldest first

    def add(self, news: History) -> bool:
        """Add an answer of the coordinator. Returns whether it held anything new."""
        if news.cursor == self.cursor:
            return False
        self.cursor = news.cursor
        steps = {step["step"]: step for step in [*self.metrics, *news.metrics]}
        self.metrics = [steps[number] for number in sorted(steps)]
        evaluations = {(found.version, found.final): found for found in [*self.evaluations, *news.evaluations]}
        self.evaluations = [evaluations[key] for key in sorted(evaluations)]
        self.samples = [*self.samples, *news.samples][-MAX_SAMPLES:]
        return True
