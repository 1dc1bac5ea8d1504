"""The optimizer updates of one step. The groups are split into updates, and each update's rows are dealt to the ranks.

    share      of n updates, update i trains on groups i, i + n, ...
    rows       planned from lengths alone, so every rank plans the same rows
    deal       FSDP gathers each block for all ranks at once, so in each turn every rank computes one row. A turn lasts
               as long as its costliest row, so rows are dealt costliest first (a single rank keeps their order). Only
               the leader has tokens and logprobs, so it sends each rank the contents of its rows (8 bytes per token)
    behaviour  logprobs that no validator checked are recomputed by the policy before the step's first update
    update     a rank packs and computes one row at a time; the denominator counts the tokens of all ranks

Invariant: each row is computed once, by one rank; a rank without a row computes a loss of 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.config import Config
from shoal.learner.batch import Contents, MicroBatch, Row, plan, with_gradient
from shoal.learner.groups import AnyGroup
from shoal.learner.loss import denominator
from shoal.learner.policy import Policy
from shoal.learner.ranks import Ranks
from shoal.learner.report import Shape, forward_flops, update_metrics


@dataclass
class OwnRow:
    """This rank's row in one turn, in which every rank computes one row."""

    row: Row | None  # None if the rank idles
    contents: Contents | None  # None if this rank has the groups, because `row` can then make its contents
    checked: bool  # whether a validator checked the behaviour logprobs of all ranks' rows in this turn

    def packed(self, *, normalize_std: bool) -> MicroBatch | None:
        """Return the packed row, or None if this rank idles."""
        if self.row is None:
            return None
        return self.row.packed(self.contents or self.row.contents(), normalize_std=normalize_std)


@dataclass
class UpdateRows:
    """This rank's rows of one update, and totals over all ranks."""

    own: list[OwnRow]
    costs: list[float]  # costs of all ranks' rows, in dealing order
    n_trained: int  # trained tokens of all ranks' rows
    denominator: float


def train(policy: Policy, groups: Sequence[AnyGroup], config: Config) -> dict[str, float]:
    """Run the step's optimizer updates. Return training metrics. Raise ShoalError, OutOfMemoryError."""
    settings = config.learner
    n_updates = min(settings.optimizer_steps_per_step, len(groups))
    shares = [share_of(policy, groups[number::n_updates], config) for number in range(n_updates)]
    for share in shares:
        fix_behaviour(policy, share)
    figures = []
    for share in shares:
        rows = (own.packed(normalize_std=settings.loss.normalize_std) for own in share.own)  # packed one at a time
        idle = {"perf/ranks_idle": idle_frac(share.costs, policy.ranks.size)}
        figures.append((share.n_trained, policy.update(rows, share.denominator) | idle))
    return update_metrics(figures)


def share_of(policy: Policy, groups: Sequence[AnyGroup], config: Config) -> UpdateRows:
    """Plan and deal the rows of one update. Groups without a gradient have no row, but the denominator counts them."""
    settings, ranks = config.learner, policy.ranks
    rows = plan(with_gradient(groups, settings.loss), row_tokens=settings.row_tokens)
    costs = [cost(row, policy.shape) for row in rows]
    order = dealing_order(costs, ranks.size)
    n_tokens = sum(group.n_tokens for group in groups)
    n_rollouts = sum(len(group.rewards) for group in groups)
    return UpdateRows(
        deal([rows[number] for number in order], ranks),
        [costs[number] for number in order],
        sum(row.n_trained for row in rows),
        denominator(settings.loss.kind, n_tokens, n_rollouts, config.sampling.max_tokens),
    )


def fix_behaviour(policy: Policy, share: UpdateRows) -> None:
    """Compute the unchecked behaviour logprobs with the current policy."""
    for own in share.own:
        if not own.checked:
            own_N = policy.own_logprobs(own.packed(normalize_std=False))
            if own.row is not None:
                contents = own.contents or own.row.contents()
                own.contents = contents.with_behaviour(own_N.numpy())


# --- dealing ----------------------------------------------------------------------------------------------------------


def cost(row: Row, shape: Shape) -> float:
    """Return the floating-point operations of one forward pass over the row."""
    flops = sum(forward_flops(shape, span.prompt, span.completions, 0) for span in row.spans)
    return flops + 2.0 * shape.head * row.n_trained


def dealing_order(costs: Sequence[float], ranks: int) -> list[int]:
    """Return row indices in dealing order: costliest first if there are several ranks, else unchanged."""
    numbers = list(range(len(costs)))
    return numbers if ranks == 1 else sorted(numbers, key=lambda number: -costs[number])


def idle_frac(costs: Sequence[float], ranks: int) -> float:
    """Return the fraction of time that ranks wait for the costliest row of a turn. `costs` are in dealing order."""
    turns = [costs[at : at + ranks] for at in range(0, len(costs), ranks)]
    total = ranks * sum(max(turn) for turn in turns)
    return 1 - sum(costs) / total if total else 0.0


def deal(rows: Sequence[Row], ranks: Ranks) -> list[OwnRow]:
    """Deal rows to the ranks in turn. Return this rank's rows. All ranks must call it."""
    own = ranks.scatter(rows)
    checked = [all(row.checked for row in rows[at : at + ranks.size]) for at in range(0, len(rows), ranks.size)]
    contents: list[Contents | None] = [None] * len(own)
    if ranks.size > 1:
        messages = None
        if ranks.leads:
            messages = [encode([row.contents() for row in rows[rank :: ranks.size]]) for rank in range(ranks.size)]
        computed = [row for row in own if row is not None]
        size_bytes = 4 * sum(row.n_tokens + row.n_trained for row in computed)
        # A rank idles only in the last turn, so only its last contents can be missing.
        contents[: len(computed)] = decode(ranks.deal(messages, size_bytes), computed)
    return [OwnRow(*each) for each in zip(own, contents, checked, strict=True)]


def encode(contents: Sequence[Contents]) -> bytes:
    """Concatenate the tokens and behaviour logprobs of each row."""
    return b"".join(array.tobytes() for row in contents for array in (row.tokens_T, row.behaviour_N))


def decode(data: bytes, rows: Sequence[Row]) -> list[Contents]:
    """Decode the contents of these rows, which `encode` encoded. Raise ValueError if the sizes differ."""
    result, at = [], 0
    for row in rows:
        tokens_T = np.frombuffer(data, np.int32, row.n_tokens, at)
        at += tokens_T.nbytes
        behaviour_N = np.frombuffer(data, np.float32, row.n_trained, at)
        at += behaviour_N.nbytes
        result.append(Contents(tokens_T, behaviour_N))
    if at != len(data):
        raise ValueError(f"got {len(data)} bytes for rows of {at} bytes: the ranks planned different rows")
    return result
