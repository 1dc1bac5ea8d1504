"""The task set of a run: training tasks of all sources, and the held-out tasks.

Invariant: a task's name is a hash of its content, and `digest` is the hash of the manifest, which holds the hash of every
chunk. So two machines with the same digest draw the same tasks. No list of tasks is held in memory.
Called by worker, validator, evaluator and the tools, through `tasks.load` and `tasks.join`.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property

from shoal.config.tasks import TaskSection
from shoal.tasks.compiled.table import FILE_BYTES, MANIFEST_BYTES, Manifest, Store, TaskView
from shoal.tasks.task import Task, TasksNotFoundError


class TaskSet:
    """The set named `digest` in `store`. Raises TasksNotFoundError if it is not there or not of these sources."""

    def __init__(self, section: TaskSection, digest: str, store: Store, notes: Sequence[str] = ()) -> None:
        self.digest = digest
        self.store = store
        self.notes = notes  # for people: what became of each source's rows
        self.manifest = Manifest.decode(store.read(digest, MANIFEST_BYTES))
        names = [source.name for source in self.manifest.sources]
        if names != [source.label for source in section.sources]:
            raise TasksNotFoundError(f"the task set {digest} is of the sources {', '.join(names)}, not of the config's")
        self.train = TaskView(store, [chunk for one in self.manifest.sources for chunk in one.chunks])
        self.heldout = TaskView(store, self.manifest.heldout)
        self.weights = [source.weight for source in section.sources]
        self.ends = list(itertools.accumulate(one.train for one in self.manifest.sources))  # of each source in `train`

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """Source files of rewards and environments of your own, by file name."""
        return {name: self.store.read(sha256, FILE_BYTES) for name, sha256 in self.manifest.files.items()}

    @property
    def samples(self) -> list[Task]:
        """A training task of each source."""
        return [self.train[start] for start in [0, *self.ends[:-1]]]

    def pick(self, drawn: bytes) -> int:
        """The index of a training task from 32 random bytes: a source by its weight, then one of its tasks."""
        total = sum(self.weights)
        point = int.from_bytes(drawn[16:24], "big") / 2**64 * total
        at = min(bisect.bisect_right(list(itertools.accumulate(self.weights)), point), len(self.weights) - 1)
        start = self.ends[at - 1] if at else 0
        return start + int.from_bytes(drawn[:8], "big") % (self.ends[at] - start)
