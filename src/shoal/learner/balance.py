"""Which rank computes which row, so that the ranks wait little for each other.

FSDP gathers each block for all ranks at once: the ranks compute one row each, in turns, and a turn lasts as long as its
costliest row. Rows have about the same number of tokens, but attention grows with the square of a sequence. So the rows are
dealt by their cost, costliest first: those of one turn then cost about the same.
Invariant: an order of the same rows; with one rank, the order they came in. Called by `deal` and the policy.
"""

from collections.abc import Sequence

from shoal.learner.batch import MicroBatch, Row
from shoal.learner.metrics import Shape, forward_flops


def cost(row: Row | MicroBatch, shape: Shape) -> float:
    """Floating-point operations of one forward over the row; the root of a packed one does not count."""
    flops = sum(forward_flops(shape, span.prompt, span.completions, 0) for span in row.spans)
    return flops + 2.0 * shape.head * row.n_trained


def order(costs: Sequence[float], ranks: int) -> list[int]:
    """The numbers of the rows in the order in which they are dealt."""
    numbers = list(range(len(costs)))
    return numbers if ranks == 1 else sorted(numbers, key=lambda number: -costs[number])


def waiting(costs: Sequence[float], ranks: int) -> float:
    """The share of the ranks' time that they wait for the costliest row of a turn; `costs` as dealt."""
    turns = [costs[at : at + ranks] for at in range(0, len(costs), ranks)]
    lasting = ranks * sum(max(turn) for turn in turns)
    return 1 - sum(costs) / lasting if lasting else 0.0
