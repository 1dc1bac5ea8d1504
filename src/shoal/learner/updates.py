"""The optimizer updates of one step: rows of groups are dealt to the ranks, and each update trains on its share.

    share      of n updates, update i trains on the groups i, i + n, ...
    rows       planned by lengths alone, so every rank plans the same ones
    deal       FSDP gathers each block for all ranks at once: the ranks compute one row each, in turns, and a turn lasts as
               long as its costliest row. So rows are dealt by cost, costliest first (one rank keeps their order). The
               leader, which alone has the tokens, sends each rank those of its own rows: 8 bytes a token
    behaviour  what nobody checked is computed by the step's first policy, before any update
    update     a rank packs and computes one row at a time; one denominator counts the tokens of all ranks' rows

Invariant: the ranks together compute each row once; one that has no row left computes a loss of 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.config import Config
from shoal.learner.batch import Contents, MicroBatch, Row, plan, teaching
from shoal.learner.groups import Known
from shoal.learner.loss import denominator
from shoal.learner.policy import Policy
from shoal.learner.ranks import Ranks
from shoal.learner.report import Shape, forward_flops, update_metrics


@dataclass
class OwnRow:
    """What this rank does in one turn, in which every rank computes one row."""

    row: Row | None  # None: it idles
    contents: Contents | None  # of the row; None: its groups are known here
    checked: bool  # all behaviour logprobs of all ranks' rows

    def packed(self, *, normalize_std: bool) -> MicroBatch | None:
        """Return the row as training data; None: this rank idles."""
        if self.row is None:
            return None
        return self.row.packed(self.contents or self.row.contents(), normalize_std=normalize_std)


@dataclass
class UpdateRows:
    """What one update trains on: this rank's rows, and what all ranks know of all rows."""

    own: list[OwnRow]
    costs: list[float]  # of all rows, as they were dealt
    n_trained: int  # tokens of all rows
    denominator: float


def train(policy: Policy, groups: Sequence[Known], config: Config) -> dict[str, float]:
    """Make the step's optimizer updates. Return the metrics of training. Raise ShoalError, OutOfMemoryError."""
    settings = config.learner
    n_updates = min(settings.optimizer_steps_per_step, len(groups))
    shares = [share_of(policy, groups[number::n_updates], config) for number in range(n_updates)]
    for share in shares:
        fix_behaviour(policy, share)
    figures = []
    for share in shares:
        rows = (own.packed(normalize_std=settings.loss.normalize_std) for own in share.own)  # one at a time
        idle = {"perf/ranks_idle": idle_frac(share.costs, policy.ranks.size)}
        figures.append((share.n_trained, policy.update(rows, share.denominator) | idle))
    return update_metrics(figures)


def share_of(policy: Policy, groups: Sequence[Known], config: Config) -> UpdateRows:
    """Plan the rows of one update's groups, and deal them. Groups that teach nothing have no row, but count."""
    settings, ranks = config.learner, policy.ranks
    rows = plan(teaching(groups, settings.loss), row_tokens=settings.row_tokens)
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
    """Take the behaviour that rows lack from the policy as it is now."""
    for own in share.own:
        if not own.checked:
            own_N = policy.own_logprobs(own.packed(normalize_std=False))
            if own.row is not None:
                contents = own.contents or own.row.contents()
                own.contents = contents.with_behaviour(own_N.numpy())


# --- dealing ----------------------------------------------------------------------------------------------------------


def cost(row: Row, shape: Shape) -> float:
    """Return the floating-point operations of one forward over the row; the root of a packed one does not count."""
    flops = sum(forward_flops(shape, span.prompt, span.completions, 0) for span in row.spans)
    return flops + 2.0 * shape.head * row.n_trained


def dealing_order(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the numbers of the rows in the order in which they are dealt."""
    numbers = list(range(len(costs)))
    return numbers if ranks == 1 else sorted(numbers, key=lambda number: -costs[number])


def idle_frac(costs: Sequence[float], ranks: int) -> float:
    """Return the share of the ranks' time that they wait for the costliest row of a turn; `costs` as dealt."""
    turns = [costs[at : at + ranks] for at in range(0, len(costs), ranks)]
    lasting = ranks * sum(max(turn) for turn in turns)
    return 1 - sum(costs) / lasting if lasting else 0.0


def deal(rows: Sequence[Row], ranks: Ranks) -> list[OwnRow]:
    """Deal these rows in turn: return this rank's own. All ranks call it at once."""
    own = ranks.scatter(rows)
    checked = [all(row.checked for row in rows[at : at + ranks.size]) for at in range(0, len(rows), ranks.size)]
    contents: list[Contents | None] = [None] * len(own)
    if ranks.size > 1:
        messages = None
        if ranks.leads:
            messages = [encode([row.contents() for row in rows[rank :: ranks.size]]) for rank in range(ranks.size)]
        mine = [row for row in own if row is not None]
        size_bytes = 4 * sum(row.n_tokens + row.n_trained for row in mine)
        contents[: len(mine)] = decode(ranks.deal(messages, size_bytes), mine)  # a rank idles in the last turn alone
    return [OwnRow(*each) for each in zip(own, contents, checked, strict=True)]


def encode(contents: Sequence[Contents]) -> bytes:
    """Return tokens and behaviour logprobs, row by row, without anything else."""
    return b"".join(array.tobytes() for of in contents for array in (of.tokens_T, of.behaviour_N))


def decode(data: bytes, rows: Sequence[Row]) -> list[Contents]:
    """Return what `encode` made of these rows. Raise ValueError if the sizes differ."""
    result, at = [], 0
    for row in rows:
        tokens_T = np.frombuffer(data, np.int32, row.n_tokens, at)
        at += tokens_T.nbytes
        behaviour_N = np.frombuffer(data, np.float32, row.n_trained, at)
        at += behaviour_N.nbytes
        result.append(Contents(tokens_T, behaviour_N))
    if at != len(data):
        raise ValueError(f"{len(data)} bytes for rows of {at}: the ranks planned different rows")
    return result
