"""How workers did with their tasks, and what follows: when a task is late, and how large the next one is.

    expected    a worker's own time from task to upload, at most SLOWEST times the pool's median. Of a newcomer: what nine of
                ten workers stay below, with the same limit; START_S while nothing was accepted in the whole pool
    late        after LATE times that. A late task is no longer counted on, and its work is given out again. Nothing else
                happens to it: it may be uploaded while a batch can take its version, and then its worker's own time grows
    missed      its worker asks for work again and will not upload it: it has newer weights, or the task is older than
                `assignment.DEADLINE_S`, or no batch can take its version any more
    rest        before the next task: the pool's median time * 2 ^ (tasks missed in a row - 1) * 2 ^ (8 * share missed)
    suspension  when the recent share of missed tasks reaches HALF

The share is an exponential average over about 8 tasks. It starts at NEWCOMER, so 4 missed tasks suspend a new key, and 6 in
a row one with a good record. Someone who comes to upload too late has missed nothing: it was slow, and it did the work.

A worker's next task holds as many groups as it finishes in the time that most workers take for theirs:

    newcomer                           base, which is `workers.groups_per_submission`
    slower than ABOUT times the median size * median / own time
    about as fast, below base          twice as many, at most base
    faster                             size * median / own time, at most twice as many and at most `workers.largest`

The size changes neither what is drawn (a larger task begins with the groups of a smaller one) nor what a group earns. Large
tasks of a worker that little is held of in escrow are always checked whole (`trust`).

Invariants: a task that is held counts as under way for LATE * SLOWEST median times at most. A task's size is between 1 and
`workers.largest`; a worker as fast as most keeps its size. Only the coordinator's clock is used, from task to upload;
what a worker says about its speed counts for nothing. Only accepted work is measured, so nobody else can slow a worker down
in the books.
"""

import statistics
from collections.abc import Sequence

from shoal.config import Config
from shoal.coordinator.database import Database
from shoal.coordinator.nodes import Member
from shoal.coordinator.submissions import Submission

LATE = 2.0
SLOWEST = 4.0
START_S = 2.5
NEWCOMER = 0.2
HALF = 0.5
SHARE_WEIGHT = 1 / 8  # of one task in the share
TIME_WEIGHT = 1 / 4  # of one task in a worker's time
MOST_REST_S = 600.0
MANY, AGAIN_S = 256, 1.0  # among more times than MANY one changes no median: they are read again after AGAIN_S
ABOUT = 4 / 3


class Arrivals:
    def __init__(self, db: Database, config: Config) -> None:
        self.db = db
        self.config = config
        self._read: list[float] = []  # the workers' times, and when they were read
        self._read_s = 0.0

    def _times(self) -> list[float]:
        """The workers' times, in order. Of a large pool they are read again once a second, not for each task."""
        now_s = self.db.clock()
        if len(self._read) <= MANY or not 0 <= now_s - self._read_s < AGAIN_S:
            self._read, self._read_s = self.db.nodes.times_taken(), now_s
        return self._read

    def groups_open(self) -> tuple[int, int]:
        """Groups in open tasks that are neither late nor silent: of proven workers, and of young keys."""
        times = self._times()
        median_s = statistics.median(times) if times else None
        new_s = START_S if median_s is None else times[(9 * len(times)) // 10]
        most_s = new_s if median_s is None else SLOWEST * median_s
        proven = young = 0
        now_s = self.db.clock()
        for groups, age_s, took_s in self.db.submissions.open_at(now_s - self.db.nodes.timeout_s, now_s):
            if age_s > LATE * min(took_s or new_s, most_s):
                continue
            proven, young = (proven + groups, young) if took_s else (proven, young + groups)
        return proven, young

    def came(self, task: Submission) -> None:
        """Count an accepted task: its worker's share of missed tasks sinks, and its time counts.

        One that was much smaller than usual, because the batch needed no more, says little about the worker's time.
        """
        node = self.db.nodes.get(task.worker)
        if node is None or task.uploaded_s is None:
            return
        took_s = max(task.uploaded_s - task.assigned_s, 1e-3)  # a clock may have been set back
        usual_size = usual(node, self.config)
        if node.took_s:
            weight = TIME_WEIGHT if 2 * task.groups > usual_size else 0.0
            took_s = node.took_s + weight * (took_s - node.took_s)
        took_s = self._fit(node, usual_size, took_s)
        share = _share(node)
        self.db.nodes.set(
            node.key, took_s=took_s, missed=share - SHARE_WEIGHT * share, missed_in_a_row=0, rests_until_s=0.0
        )

    def late(self, task: Submission) -> None:
        """A task that came when no batch could take it any more, which is no offence. Its worker gets smaller ones."""
        self.db.submissions.move(task, "late")
        node = self.db.nodes.get(task.worker)
        if node is not None:
            self._fit(node, task.groups, max(self.db.clock() - task.assigned_s, 1e-3), only_smaller=True)

    def _fit(self, node: Member, size: int, took_s: float, *, only_smaller: bool = False) -> float:
        """Give a worker tasks of the size that fits its time. Returns how long one of the new size probably takes."""
        times = self._times()
        if not times:
            return took_s
        fitted = fitting(size, took_s, statistics.median(times), self.config)
        if only_smaller:
            fitted = min(fitted, size)
        if fitted != size or not node.size:
            self.db.nodes.set(node.key, size=fitted)
        return took_s * fitted / size

    def missed(self, tasks: Sequence[Submission]) -> None:
        """Close tasks that their worker will not upload. It rests, and is suspended if it misses too many.

        Tasks of one worker that are lost together count as one: it died while it worked on them.
        """
        for task in tasks:
            self.db.submissions.move(task, "miss")
        node = self.db.nodes.get(tasks[0].worker)
        if node is None:
            return
        in_a_row = node.missed_in_a_row + 1
        share = _share(node)
        share += SHARE_WEIGHT * (1 - share)
        times = self._times()
        median_s = statistics.median(times) if times else START_S
        rest_s = min(median_s * 2.0 ** min(in_a_row - 1 + 8 * share, 60), MOST_REST_S)
        now_s = self.db.clock()
        self.db.nodes.set(node.key, missed=share, missed_in_a_row=in_a_row, rests_until_s=now_s + rest_s)
        if share >= HALF:
            why = f"{in_a_row} tasks in a row never came" if in_a_row > 1 else "too many tasks never came"
            self.db.nodes.suspend(node.key, why, now_s)


def usual(node: Member | None, config: Config) -> int:
    """Groups in a worker's next task, if the open batch needs as many."""
    base = config.workers.groups_per_submission
    return min(node.size, largest(config)) if node is not None and node.size else base


def largest(config: Config) -> int:
    """Groups in the largest task: its file fits into `max_submission_bytes` whatever is generated."""
    return min(config.max_submission_bytes // config.group_bytes, config.workers.largest)


def fitting(size: int, took_s: float, median_s: float, config: Config) -> int:
    """The size after tasks of this one took so long, and the pool's median worker so long for its own."""
    base = config.workers.groups_per_submission
    pace = median_s / took_s
    if pace < 1 / ABOUT:
        return max(round(size * pace), 1)
    if size < base:
        return min(2 * size, base)
    if pace > ABOUT:
        return min(round(size * min(pace, 2.0)), largest(config))
    return size


def _share(node: Member) -> float:
    """The share of its tasks that a worker missed, a newcomer's if nothing is known of it."""
    is_new = not node.took_s and not node.missed_in_a_row
    return max(node.missed, NEWCOMER) if is_new else node.missed
