"""Watch a run: its state, its progress, and reasons to stop it.

Invariant: a run that cannot make progress is stopped, and the error names the reason: the run stalls (STALL_S), its
groups teach nothing (NO_SIGNAL_GROUPS in a row), its grader fails too often (GRADER_ERRORS), or its disk is full.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

from shoal.cli.preflight.machine import check_left, free_bytes
from shoal.config.tasks import GRADER_ERRORS
from shoal.errors import ShoalError
from shoal.protocol.history import Grading, PoolWatch, Status, UnreachableError
from shoal.watch.figures import activity, grader_warning, no_signal_warning, node_condition

NO_SIGNAL_GROUPS = 512  # a run is stopped after this many consecutive accepted groups, each with equal rewards
STALL_S = 900.0  # without an accepted submission or a trained step, while no node computes
LONGEST_WORK_S = 4 * 3600.0  # the same while a node computes: a step or an evaluation may take hours on a slow machine
COMPUTES = ("learner", "worker", "validator", "evaluator")
MIN_GRADED = 64  # rollouts before the grader's error rate is checked
# MIN_GRADED of a resumed run. By then, all recent rollouts in which errors are counted are newer than the resume.
RECENT_GRADED = 512


class Watch:
    def __init__(
        self,
        folder: Path,
        pool: PoolWatch,
        *,
        stall_s: float = STALL_S,
        clock: Callable[[], float] = time.monotonic,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self.folder = folder
        self.pool = pool
        self.stall_s = stall_s
        self.clock = clock
        self.free = free
        self.status: Status | None = None  # the newest
        self._progress = (-1, -1)
        self._progress_s = clock()
        # counts at the first look, which are from before the run was resumed
        self._graded_before = math.inf  # graded rollouts
        self._flat_before = math.inf  # consecutive groups, each with equal rewards

    def look(self) -> Status | None:
        """Return the run's state; None if the coordinator is unreachable, for example while it restarts."""
        try:
            self.status = self.pool.look()
        except UnreachableError:
            return None
        self._flat_before = min(self._flat_before, self.status.signal.flat)
        self._graded_before = min(self._graded_before, self.status.grading.total)
        recorded = len(self.pool.history.metrics) + len(self.pool.history.evaluations)
        progress = (recorded, sum(node.accepted for node in self.status.nodes))
        if progress != self._progress:
            self._progress, self._progress_s = progress, self.clock()
        return self.status

    def check(self) -> None:
        """Raise ShoalError if the run cannot continue."""
        check_left(self.folder, self.free(self.folder))
        stalled_s = self.clock() - self._progress_s
        if stalled_s > (max(self.stall_s, LONGEST_WORK_S) if self._computes() else self.stall_s):
            raise ShoalError(f"nothing was accepted or trained for {stalled_s:.0f} s; {self._activities()}")
        if self.status is None:
            return
        if self.status.signal.flat - self._flat_before >= NO_SIGNAL_GROUPS:
            raise ShoalError(
                f"{no_signal_warning(self.status.signal)}; see what the model writes in {self.folder / 'rollouts.jsonl'}, "
                "then try easier or harder tasks, or more completions per group (sampling.group_size)"
            )
        if words := self._grader_fails(self.status.grading):
            raise ShoalError(
                f"{words}; grade completions of {self.folder / 'rollouts.jsonl'} by hand (docs/tasks.md). A run never "
                "changes its tasks and rewards, so fix them and start a new run"
            )

    def _grader_fails(self, grading: Grading) -> str:
        """Return what is wrong with the grading of the newest rollouts; "" if its errors are within the limit."""
        graded = grading.total - self._graded_before
        needed = RECENT_GRADED if self._graded_before else MIN_GRADED
        if graded < needed or grading.errors <= GRADER_ERRORS * grading.recent:
            return ""
        return grader_warning(grading) + f", more than {GRADER_ERRORS:.0%}"

    def _computes(self) -> bool:
        """Return whether a live node says that it computes."""
        return self.status is not None and any(
            node.role in COMPUTES
            and node.stats.doing
            and not node.stats.waiting
            and node_condition(node, self.status, running=True)[0] == "here"
            for node in self.status.nodes
        )

    def _activities(self) -> str:
        nodes = self.status.nodes if self.status else []
        known = [f"{node.name} is {activity(node)}" for node in nodes if node.stats.doing]
        return "; ".join(known) or f"see {self.folder / 'logs'}"
