"""Workers' turnaround times. They decide when a task is late or missed, and how large a worker's next task is.

    expected    a worker's own time from task to upload, at most MAX_SLOWDOWN times the pool's median. For a newcomer:
                the pool's 90th percentile, with the same limit; START_S until the pool has accepted any work
    late        after LATE times the expected time. A late task no longer counts as in progress; its work is assigned
                again. It may still be uploaded while a batch can take its version. If it is accepted, its worker's own
                time becomes longer
    missed      its worker requests another task and will not upload this one, because the worker has newer weights, or
                lost this task and it is older than `assignment.DEADLINE_S`, or lost the file that it announced.
                A miss of a task from before the coordinator's start has no further consequence, because the restart
                may be its cause
    rest        how long a worker gets no task after a miss: the pool's median time * 2 ^ (tasks missed in a row - 1)
                * 2 ^ (8 * share missed), at most MAX_REST_S
    suspension  when the recent share of missed tasks reaches SUSPEND_SHARE

The share of missed tasks is an exponential average over about 8 tasks. It starts at INITIAL_SHARE. So 4 missed tasks
suspend a new key, and 6 in a row suspend a key with a good record. A task that is uploaded too late does not count as
missed, because the worker was slow but did the work.

A worker's next task has as many groups as the worker can finish in the pool's median time:

    newcomer                           base, which is `workers.groups_per_submission`
    slower than SIMILAR * median       size * median / own time
    not slower, size below base        twice as many, at most base
    faster                             size * median / own time, at most twice as many and at most `workers.largest`

The size does not change which tasks are drawn, because a larger task begins with the groups of a smaller one. A group
earns the same in a task of any size. If a worker has little credit in escrow, its large tasks are always checked whole
(`trust`).

Invariants: an open task counts as in progress for at most LATE * MAX_SLOWDOWN median times. A task's size is between 1
and `workers.largest`; a worker of median speed keeps its size. Times are measured by the coordinator's clock, from task
to upload; a worker's own reports are ignored. Only accepted work is measured, so nobody else can make a worker look
slow.
"""

import statistics
from collections.abc import Sequence

from shoal.config import Config
from shoal.coordinator.database import Database
from shoal.coordinator.nodes import Member
from shoal.coordinator.submissions import Submission

LATE = 2.0
MAX_SLOWDOWN = 4.0
START_S = 2.5
INITIAL_SHARE = 0.2
SUSPEND_SHARE = 0.5
SHARE_WEIGHT = 1 / 8  # weight of one task in a worker's share of missed tasks
TIME_WEIGHT = 1 / 4  # weight of one task in a worker's average time
MAX_REST_S = 600.0
LARGE_POOL, REFRESH_S = 256, 1.0  # one time hardly moves a large pool's median, so cache the times for REFRESH_S
SIMILAR = 4 / 3


class Arrivals:
    def __init__(self, db: Database, config: Config) -> None:
        self.db = db
        self.config = config
        self.started_s = db.clock()
        self._cached_times: list[float] = []
        self._cached_s = 0.0  # when the times were read

    def _times(self) -> list[float]:
        """Return the workers' times in ascending order, cached for a large pool."""
        now_s = self.db.clock()
        if len(self._cached_times) <= LARGE_POOL or not 0 <= now_s - self._cached_s < REFRESH_S:
            self._cached_times, self._cached_s = self.db.nodes.times_taken(), now_s
        return self._cached_times

    def groups_open(self) -> tuple[int, int]:
        """Count the groups in live workers' open tasks that are not late.

        Return two counts: for workers with accepted work, and for new keys.
        """
        times = self._times()
        median_s = statistics.median(times) if times else None
        newcomer_s = START_S if median_s is None else times[(9 * len(times)) // 10]
        max_s = newcomer_s if median_s is None else MAX_SLOWDOWN * median_s
        proven = new = 0
        now_s = self.db.clock()
        for groups, age_s, took_s in self.db.submissions.open_at(now_s - self.db.nodes.timeout_s, now_s):
            if age_s > LATE * min(took_s or newcomer_s, max_s):
                continue
            proven, new = (proven + groups, new) if took_s else (proven, new + groups)
        return proven, new

    def accepted(self, task: Submission) -> None:
        """Count an accepted task: lower its worker's share of missed tasks and update its time.

        A task is much smaller than usual if the batch needs few groups. Such a task does not change the worker's time.
        """
        node = self.db.nodes.get(task.worker)
        if node is None or task.uploaded_s is None:
            return
        took_s = max(task.uploaded_s - task.assigned_s, 1e-3)  # the clock may have been set back
        size = usual_size(node, self.config)
        if node.took_s:
            weight = TIME_WEIGHT if 2 * task.groups > size else 0.0
            took_s = node.took_s + weight * (took_s - node.took_s)
        took_s = self._fit(node, size, took_s)
        share = _share(node)
        self.db.nodes.set(
            node.key, took_s=took_s, missed=share - SHARE_WEIGHT * share, missed_in_a_row=0, rests_until_s=0.0
        )

    def late(self, task: Submission) -> None:
        """Close a task whose version is too old for every batch, without penalty. Its worker may get smaller tasks."""
        self.db.submissions.move(task, "late")
        node = self.db.nodes.get(task.worker)
        if node is not None:
            self._fit(node, task.groups, max(self.db.clock() - task.assigned_s, 1e-3), only_smaller=True)

    def _fit(self, node: Member, size: int, took_s: float, *, only_smaller: bool = False) -> float:
        """Set the size of a worker's tasks to fit its time. Return the expected time for the new size."""
        times = self._times()
        if not times:
            return took_s
        fitted = fitted_size(size, took_s, statistics.median(times), self.config)
        if only_smaller:
            fitted = min(fitted, size)
        if fitted != size or not node.size:
            self.db.nodes.set(node.key, size=fitted)
        return took_s * fitted / size

    def missed(self, tasks: Sequence[Submission]) -> None:
        """Close tasks that their worker will not upload. The worker must rest, and is suspended if it misses too many.

        All tasks belong to one worker. They count as one missed task, because one crash can lose all of them.
        """
        for task in tasks:
            self.db.submissions.move(task, "miss")
        node = self.db.nodes.get(tasks[0].worker)
        if node is None or all(task.assigned_s < self.started_s for task in tasks):
            return
        in_a_row = node.missed_in_a_row + 1
        share = _share(node)
        share += SHARE_WEIGHT * (1 - share)
        times = self._times()
        median_s = statistics.median(times) if times else START_S
        rest_s = min(median_s * 2.0 ** min(in_a_row - 1 + 8 * share, 60), MAX_REST_S)
        now_s = self.db.clock()
        self.db.nodes.set(node.key, missed=share, missed_in_a_row=in_a_row, rests_until_s=now_s + rest_s)
        if share >= SUSPEND_SHARE:
            why = f"{in_a_row} tasks in a row were not uploaded" if in_a_row > 1 else "too many tasks were not uploaded"
            self.db.nodes.suspend(node.key, why, now_s)


def usual_size(node: Member | None, config: Config) -> int:
    """Return the number of groups in a worker's next task, if the open batch needs that many."""
    base = config.workers.groups_per_submission
    return min(node.size, max_size(config)) if node is not None and node.size else base


def max_size(config: Config) -> int:
    """Return the number of groups in the largest task. Its file always fits into `max_submission_bytes`."""
    return min(config.max_submission_bytes // config.group_bytes, config.workers.largest)


def fitted_size(size: int, took_s: float, median_s: float, config: Config) -> int:
    """Return the next size for a worker that takes `took_s` for `size` groups. `median_s`: the pool's median time."""
    base = config.workers.groups_per_submission
    pace = median_s / took_s
    if pace < 1 / SIMILAR:
        return max(round(size * pace), 1)
    if size < base:
        return min(2 * size, base)
    if pace > SIMILAR:
        return min(round(size * min(pace, 2.0)), max_size(config))
    return size


def _share(node: Member) -> float:
    """Return a worker's recent share of missed tasks; at least INITIAL_SHARE for a newcomer."""
    is_new = not node.took_s and not node.missed_in_a_row
    return max(node.missed, INITIAL_SHARE) if is_new else node.missed
