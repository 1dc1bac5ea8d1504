"""One optimizer update's share of a step's groups: its rows, and how far they are computed.

A share can grow while its step's batch fills (`learner.stream`): rows are dealt to the ranks when they are closed. Of the
first share, gradients are computed then. Gradients of the others are those of policies that exist after it. But what the
step's first policy and the reference say of their rows does not change, so these logprobs are computed early (`prepare`).
The sums stay undivided until the share is complete, because its denominator counts all of its tokens (`Policy.apply`).
Invariant: the same groups in the same order give the same bits, whenever they came; on one rank also without `stream`. If
the share no longer begins with what was computed, as after a worker's eviction, it starts again.
Called by the learner's loop.
"""

import time
from collections.abc import Sequence

from shoal.config import Config
from shoal.learner.batch import Row, Rows, teaching
from shoal.learner.deal import Turn, deal
from shoal.learner.group import Known
from shoal.learner.loss import denominator
from shoal.learner.policy import ZEROS, Policy


class Share:
    def __init__(self, config: Config, policy: Policy) -> None:
        self.config = config
        self.settings = config.learner
        self.policy = policy
        self.seconds = 0.0  # spent on rows so far, also on those that were forgotten
        self._start()

    def _start(self) -> None:
        self.groups: list[Known] = []
        self.n_computed = 0  # tokens whose gradient is computed
        self._sums = ZEROS
        self._closed: list[Row] = []  # and not dealt yet
        self._turns: list[Turn] = []  # dealt, and their gradients not computed yet
        self._rows = Rows(row_tokens=self.settings.row_tokens, packs=self.policy.packs)

    def take(self, groups: Sequence[Known]) -> None:
        """All groups of the share that are known by now, in order."""
        if list(groups[: len(self.groups)]) != self.groups:
            self.forget()
        new = groups[len(self.groups) :]
        self.groups += new
        for group in teaching(new, self.settings.loss):
            self._closed += self._rows.add(group)

    def forget(self) -> None:
        """Be empty again."""
        if self.n_computed:  # otherwise the gradients are another share's
            self.policy.forget()
        self._start()

    def close(self) -> None:
        """The share is complete."""
        self._closed += self._rows.close()

    @property
    def due(self) -> bool:
        """Whether rows wait whose gradients can be computed: one for each rank."""
        return bool(self._turns) or len(self._closed) >= self.policy.ranks.size

    def compute_next(self) -> None:
        """Add the gradient of the next row, or of one on each rank. Without `stream`, of all that are closed."""
        started_s = time.monotonic()
        if not self._turns:
            self._deal(1 if self.settings.stream else None)
        n = 1 if self.settings.stream else len(self._turns)
        turns, self._turns = self._turns[:n], self._turns[n:]
        for turn in turns:
            self._see(turn)
        recomputed = self.settings.behaviour_logprobs == "recomputed"
        sums = self.policy.add(
            (turn.to_train(recomputed=recomputed) for turn in turns),
            [cost for turn in turns for cost in turn.costs],
            referenced=all(turn.referenced for turn in turns),
        )
        self._sums = {name: amount + sums[name] for name, amount in self._sums.items()}
        self.n_computed += sum(turn.n_trained for turn in turns)
        self.seconds += time.monotonic() - started_s

    @property
    def preparable(self) -> bool:
        """Whether rows wait of which something can be computed before it is this share's turn."""
        return len(self._closed) >= self.policy.ranks.size or not all(turn.ready for turn in self._turns)

    def prepare_next(self) -> None:
        """Compute of the next row, or of one on each rank, what no update changes."""
        started_s = time.monotonic()
        if all(turn.ready for turn in self._turns):
            self._deal(1)
        turn = next(turn for turn in self._turns if not turn.ready)
        self._see(turn)
        if self.policy.reference is not None:
            turn.reference_N, turn.referenced = self.policy.reference_logprobs(turn.micro()), True
        turn.ready = True
        self.seconds += time.monotonic() - started_s

    def fix_behaviour(self) -> None:
        """Take the behaviour that rows still lack from the policy as it is now, before another share updates it."""
        self._deal()
        for turn in self._turns:
            self._see(turn)

    def update(self) -> dict[str, float]:
        """Compute the rows that are left, and update the policy."""
        self._deal()
        while self._turns:
            self.compute_next()
        n_tokens = sum(group.n_tokens for group in self.groups)
        n_rollouts = sum(len(group.rewards) for group in self.groups)
        over = denominator(self.settings.loss.kind, n_tokens, n_rollouts, self.config.sampling.max_tokens)
        return self.policy.apply(self._sums, over)

    def _deal(self, turns: int | None = None) -> None:
        """Deal closed rows: for so many turns, else all. With `stream` by turns, in order; else by cost among all."""
        size = self.policy.ranks.size if self.settings.stream else len(self._closed)
        while self._closed and turns != 0:
            rows, self._closed = self._closed[:size], self._closed[size:]
            self._turns += deal(
                rows, self.policy.ranks, self.policy.shape, normalize_std=self.settings.loss.normalize_std
            )
            turns = None if turns is None else turns - 1

    def _see(self, turn: Turn) -> None:
        """Compute the turn's behaviour by the policy as it is now, unless nothing lacks it or it was done before."""
        if turn.seen:
            return
        turn.seen = True
        if self.settings.behaviour_logprobs == "recomputed" or not turn.checked:
            turn.own_N = self.policy.own_logprobs(turn.micro())


def can_compute(shares: Sequence[Share]) -> bool:
    """Whether something of a step's shares can be computed before its batch is full."""
    return bool(shares) and (shares[0].due or any(share.preparable for share in shares[1:]))


def compute_early(shares: Sequence[Share]) -> None:
    """Compute the next of it, if there is any: gradients of the first share first."""
    if shares[0].due:
        shares[0].compute_next()
    elif waiting := [share for share in shares[1:] if share.preparable]:
        waiting[0].prepare_next()
