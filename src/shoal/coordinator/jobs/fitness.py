"""Whether a worker is what the run requires (`[requirements]`): by its own report when it joins, by its work afterwards.

The report says memory, cores, device and engine. It can only shut its sender out: nothing is gained by a false one, because
no task, size or pay follows from it. Speed is never asked for, it is measured. Each task is a challenge that nobody can
tell from work, because it is work. Its nonce is unpredictable, a validator checks and counts its tokens, and the
coordinator's clock runs from task to upload, of several tasks at once from one upload to the next. So a worker cannot be
fast for a test only.

Invariant: only accepted work counts, so nobody else can slow a worker down in the books, and whoever is too slow is paid for
what it did. It gets no tasks for RETRY_S, and is then measured again.
Called by `members` and `submissions`.
"""

from shoal.config import Config
from shoal.config.checking import RequirementsSection
from shoal.coordinator.jobs import sizes
from shoal.coordinator.standing import states
from shoal.coordinator.state.database import Database
from shoal.coordinator.tables.submissions import Submission
from shoal.protocol.messages import Capability

MEASURED = 4  # tasks, before their speed counts against a worker
WEIGHT = 1 / 4  # of one task in the speed
RETRY_S = 600.0
GIB = 1 << 30


def lacks(reported: Capability | None, wants: RequirementsSection) -> str:
    """What the run requires and a machine does not report; "" if it reports all of it."""
    has = reported or Capability()
    missing = []
    if has.memory_bytes < wants.memory_gib * GIB:
        missing.append(f"{wants.memory_gib:g} GiB of memory (it has {has.memory_bytes / GIB:.1f})")
    if wants.devices and has.device not in wants.devices:
        missing.append(f"a device of {', '.join(wants.devices)} (it has {has.device or 'not said which'})")
    if wants.engines and has.engine not in wants.engines:
        missing.append(f"an engine of {', '.join(wants.engines)} (it has {has.engine or 'not said which'})")
    return " and ".join(missing)


class Fitness:
    def __init__(self, db: Database, config: Config) -> None:
        self.db = db
        self.config = config

    def came(self, task: Submission, tokens: int) -> None:
        """An accepted task of so many tokens, as its validator counted them. Who is too slow becomes `unfit`."""
        node = self.db.nodes.get(task.worker)
        if node is None or task.uploaded_s is None or 2 * task.groups <= sizes.usual(node, self.config):
            return  # a task cut short, because the batch needed no more, takes longer for each token
        if task.assigned_s < node.state_s:
            return  # it is of the time before the worker was unfit, and is measured anew
        speed = tokens / max(self._seconds(task, task.uploaded_s), 1e-3)  # a clock may have been set back
        if node.speeds:
            speed = node.tokens_per_s + WEIGHT * (speed - node.tokens_per_s)
        self.db.nodes.set_speed(node.key, speed, node.speeds + 1)
        least = self.config.requirements.tokens_per_s
        if node.speeds + 1 < MEASURED or speed >= least:
            return
        why = f"{speed:.3g} tokens/s in its newest tasks, and this run requires {least:g}"
        if states.move(self.db.nodes, node.key, "fall_short", why, self.db.clock()):
            self.db.nodes.set_speed(node.key, 0.0, 0)

    def _seconds(self, task: Submission, uploaded_s: float) -> float:
        """What the worker took for this task: while it holds several, since its upload of the one before.

        Two files that it sends together count for half of their time or less: it holds so many tasks at most.
        """
        before = self.db.submissions.before(task)
        last_s = before.uploaded_s if before and before.uploaded_s else 0.0
        held = self.config.workers.in_flight + 1  # one of them while it is uploaded
        return max(uploaded_s - max(task.assigned_s, last_s), (uploaded_s - task.assigned_s) / held)
