"""The task set of a run: training tasks of all sources, and the held-out tasks.

Invariant: a task's name is a hash of its content, `digest` is a hash of all tasks in order, and no question is both trained
on and held out. So two machines with the same digest draw the same tasks.
Called by worker, validator, evaluator and the tools, through `tasks.load`.
"""

import bisect
import hashlib
import itertools
import json
from collections.abc import Sequence

from shoal.config.recipe import SourceSection, TaskSection
from shoal.tasks.sources import read_source
from shoal.tasks.task import Task, TasksNotFoundError

MIN_TRAIN = 16


class TaskSet:
    def __init__(self, section: TaskSection) -> None:
        shares = _shares([source.weight for source in section.sources], section.heldout)
        parts = [_split(source, share) for source, share in zip(section.sources, shares, strict=True)]
        apart = {task.question for _, heldout in parts for task in heldout}
        by_source = [[task for task in train if task.question not in apart] for train, _ in parts]
        self.train: Sequence[Task] = [task for tasks in by_source for task in tasks]
        self.heldout: Sequence[Task] = sorted((task for _, heldout in parts for task in heldout), key=_order)
        self.weights = [source.weight for source in section.sources]
        self.ends = list(itertools.accumulate(map(len, by_source)))  # of each source in `train`
        self.digest = _digest(self.train, self.heldout)
        if section.digest and section.digest != self.digest:
            raise TasksNotFoundError(
                f"tasks.digest is {section.digest}, but the sources give {self.digest}: use the same files on every "
                "machine, or correct the config"
            )

    def pick(self, drawn: bytes) -> int:
        """The index of a training task from 32 random bytes: a source by its weight, then one of its tasks."""
        total = sum(self.weights)
        point = int.from_bytes(drawn[16:24], "big") / 2**64 * total
        at = min(bisect.bisect_right(list(itertools.accumulate(self.weights)), point), len(self.weights) - 1)
        start = self.ends[at - 1] if at else 0
        return start + int.from_bytes(drawn[:8], "big") % (self.ends[at] - start)


def _split(source: SourceSection, heldout: int) -> tuple[list[Task], list[Task]]:
    """A source's tasks to train on and those held out, each in the order of a hash of the question."""
    train = sorted(read_source(source, source.split), key=_order)
    if source.heldout_split:
        found = sorted(read_source(source, source.heldout_split), key=_order)[:heldout]
    else:
        found, train = train[:heldout], train[heldout:]
    if len(found) < heldout or len(train) < MIN_TRAIN:
        hint = "; raise operand_max" if source.generator == "arithmetic" else ""
        raise TasksNotFoundError(
            f"source {source.label} has {len(train)} tasks to train on and {len(found)} held out; {MIN_TRAIN} and "
            f"{heldout} are needed: lower tasks.heldout or add tasks{hint}"
        )
    return train, found


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """`total` in whole shares proportional to the weights.

    >>> _shares([1, 1, 2], 10)
    [2, 3, 5]
    """
    ends = [round(sum(weights[: n + 1]) / sum(weights) * total) for n in range(len(weights))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _order(task: Task) -> bytes:
    return hashlib.sha256(f"shoal/tasks/{task.question}".encode()).digest()


def _digest(train: Sequence[Task], heldout: Sequence[Task]) -> str:
    listed = [
        [[task.id, task.question, task.answer, task.tests, task.metadata] for task in tasks]
        for tasks in (train, heldout)
    ]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()
