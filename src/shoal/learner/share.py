"""One optimizer update's share of a step's groups: its rows, and how far their gradient is computed.

The first update's share can grow while its step's batch fills (`learner.stream`): each row is computed when it is closed.
The sums stay undivided until the share is complete, because its denominator counts all of its tokens (`Policy.apply`).
Invariant: the same groups in the same order give the same bits, whenever they came; on one rank also without `stream`. If
the share no longer begins with what was computed, as after a worker's eviction, it starts again.
Called by the learner's loop.
"""

import time
from collections.abc import Sequence

from shoal.config import Config
from shoal.learner.batch import MicroBatch, Rows, teaching, with_own_behaviour
from shoal.learner.groups import Group
from shoal.learner.loss import denominator
from shoal.learner.policy import Policy


class Share:
    def __init__(self, config: Config, policy: Policy) -> None:
        self.config = config
        self.settings = config.learner
        self.policy = policy
        self.seconds = 0.0  # spent on rows so far, also on those that were forgotten
        self._start()

    def _start(self) -> None:
        self.groups: list[Group] = []
        self.n_computed = 0  # tokens whose gradient is computed
        self._sums = self.policy.gradients([])  # zeros
        self._closed: list[MicroBatch] = []  # and not computed yet
        self._knows_behaviour = False
        self._rows = Rows(
            row_tokens=self.settings.row_tokens,
            normalize_std=self.settings.loss.normalize_std,
            packs=self.policy.packs,
        )

    def take(self, groups: Sequence[Group]) -> None:
        """All groups of the share that are known by now, in order."""
        if list(groups[: len(self.groups)]) != self.groups:
            self.forget()
        new = groups[len(self.groups) :]
        self.groups += new
        for group in teaching(new, self.settings.loss):
            self._closed += self._rows.add(group)

    def forget(self) -> None:
        """Be empty again."""
        self.policy.forget()
        self._start()

    def close(self) -> None:
        """The share is complete."""
        self._closed += self._rows.close()

    @property
    def due(self) -> bool:
        """Whether closed rows wait: one for each rank."""
        return len(self._closed) >= self.policy.ranks.size

    def compute_next(self) -> None:
        """Add the gradient of the next row, or of one on each rank. Without `stream`, of all that are closed."""
        started_s = time.monotonic()
        n = self.policy.ranks.size if self.settings.stream else len(self._closed)
        rows, self._closed = self._with_behaviour(self._closed[:n]), self._closed[n:]
        sums = self.policy.gradients(rows)
        self._sums = {name: amount + sums[name] for name, amount in self._sums.items()}
        self.n_computed += sum(len(row.advantage_N) for row in rows)
        self.seconds += time.monotonic() - started_s

    def fix_behaviour(self) -> None:
        """Take the behaviour that rows still lack from the policy as it is now, before another share updates it."""
        self._closed = self._with_behaviour(self._closed)
        self._knows_behaviour = True

    def _with_behaviour(self, rows: list[MicroBatch]) -> list[MicroBatch]:
        if self._knows_behaviour:
            return rows
        if self.settings.behaviour_logprobs == "recomputed":
            return self.policy.recompute_behaviour(rows)
        if any(bool(row.behaviour_N.isnan().any()) for row in rows):
            return with_own_behaviour(rows, self.policy.recompute_behaviour(rows))
        return rows

    def update(self) -> dict[str, float]:
        """Compute the rows that are left, and update the policy."""
        while self._closed:
            self.compute_next()
        n_tokens = sum(group.n_tokens for group in self.groups)
        n_rollouts = sum(len(group.completions) for group in self.groups)
        over = denominator(self.settings.loss.kind, n_tokens, n_rollouts, self.config.sampling.max_tokens)
        return self.policy.apply(self._sums, over)
