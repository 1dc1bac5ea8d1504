"""A whole pool in virtual time: workers of any speed that crash, lose uploads or hold tasks, a validator and a learner.

Nothing waits: an event moves the clock. Called by the tests of `arrivals`. Left out: files, weights, signatures.
"""

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.coordinator.database import PoolError
from shoal.protocol.messages import Assignment

from .support import VALIDATOR, Clock, Harness, open_pool

POLL_S, JUDGE_S, LEARN_S = 0.5, 0.25, 1.0
STEPS = 12


@dataclass
class Member:
    """A worker. `silent`: it asks for tasks and uploads nothing."""

    key: str
    takes_s: float  # for a task, and `group_s` for each of its groups
    group_s: float = 0.0
    silent: bool = False
    crashes: float = 0.0  # probability that it dies over a task, and starts again with the newest weights
    loses: float = 0.0  # probability that an upload is lost with its process
    version: int = 0
    tasks: list[Assignment] = field(default_factory=list)
    holds: list[Assignment] = field(default_factory=list)  # of them, those that it works on
    busy_until_s: float = 0.0
    lives: int = 0  # how often it died
    took: list[float] = field(default_factory=list)  # seconds, of each task that it finished


class Simulation:
    def __init__(
        self,
        members: list[Member],
        seed: int,
        *,
        settings: dict[str, object] | None = None,
        useful: float = 1.0,
        groups: int = 2,
        deadline_s: float = 60.0,
    ) -> None:
        """`useful`: the share of useful groups. `groups`: of a usual submission."""
        self.useful = useful
        self.random = random.Random(seed)
        self.in_flight = int(str((settings or {}).get("in_flight", 1)))
        self.clock = Clock()
        chosen = {"prompts_per_step": 8} | (settings or {})
        self.harness: Harness = open_pool(clock=self.clock, run={"steps": STEPS}, groups=groups, **chosen)
        self.harness.pool.assignments.deadline_s = deadline_s
        self.harness.pool.db.nodes.timeout_s = math.inf
        self.members = members
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.published = 0
        self.harness.join(VALIDATOR, "validator")
        for member in members:
            self.harness.join(member.key, name=f"worker-{member.key[:4]}")
        self.harness.publish(0)

    def run(self, most_s: float = 5_000.0) -> float:
        """Seconds until the last step's batch is full, or `most_s`."""
        start_s = self.clock.now_s
        self.harness.pool.db.connection.sqlite.execute("PRAGMA synchronous = OFF")
        for member in self.members:
            self.after(self.random.random(), lambda member=member: self.ask(member))  # type: ignore[misc]
        self.after(JUDGE_S, self.judge)
        while self.events and self.open_step() < STEPS and self.clock.now_s - start_s < most_s:
            self.clock.now_s, _, act = heapq.heappop(self.events)
            act()
        return self.clock.now_s - start_s

    def after(self, wait_s: float, act: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.clock.now_s + wait_s, self.count, act))

    def open_step(self) -> int:
        return self.harness.pool.db.open_step()

    # --- workers -----------------------------------------------------------------------------------------------------

    def ask(self, member: Member) -> None:
        if not member.holds:
            member.version = self.published
        elif member.version != self.published or len(member.holds) == self.in_flight:
            return
        held = [one.id for one in member.holds]
        task = self.harness.beat(member.key, member.version, working_on=held).assignment
        if (task is None and not held) or member.silent:
            self.after(POLL_S, lambda: self.ask(member))
        if task is None:
            return
        member.tasks.append(task)
        if member.silent:
            return
        member.holds.append(task)
        took_s = (member.takes_s + member.group_s * task.groups) * self.random.uniform(0.8, 1.25)
        takes_s = took_s + max(member.busy_until_s - self.clock.now_s, 0.0)  # after those before
        life = member.lives
        if self.random.random() < member.crashes:
            self.after(takes_s * self.random.random() + 1.0, lambda: self.die(member, life))
        elif self.random.random() < member.loses:
            self.after(takes_s + 5.0, lambda: self.die(member, life))
        else:
            member.took.append(took_s)
            member.busy_until_s = self.clock.now_s + takes_s
            self.after(takes_s, lambda: self.upload(member, task, life))
        if self.in_flight > 1:
            self.ask(member)

    def die(self, member: Member, life: int) -> None:
        """All that it works on is lost. It starts again at once."""
        if life == member.lives:
            member.lives, member.holds, member.busy_until_s = life + 1, [], 0.0
            self.ask(member)

    def upload(self, member: Member, task: Assignment, life: int) -> None:
        if life != member.lives:
            return
        member.holds.remove(task)
        try:
            self.harness.pool.assignments.may_upload(member.key, task.id)
            self.harness.pool.assignments.uploaded(member.key, task.id, "9" * 64)
        except PoolError as refusal:
            assert refusal.status == 409
        self.ask(member)

    # --- the trusted roles -------------------------------------------------------------------------------------------

    def judge(self) -> None:
        before = self.open_step()
        for claim in self.harness.claims(VALIDATOR, 4):
            useful = tuple(self.random.random() < self.useful for _ in range(claim.assignment.groups))
            self.harness.judge(claim.assignment.id, None, useful)
        for step in range(before, self.open_step()):
            self.after(LEARN_S, lambda step=step: self.publish(step + 1))  # type: ignore[misc]
        self.after(JUDGE_S, self.judge)

    def publish(self, version: int) -> None:
        self.published = version
        self.harness.publish(version)


def workers(count: int, takes_s: float = 2.0, first: int = 0) -> list[Member]:
    return [Member(f"{first + number:04x}" * 16, takes_s) for number in range(count)]


def silent(count: int) -> list[Member]:
    """Keys that sort and join before all others, as an attacker's may."""
    return [Member(f"{0xF000 + number:04x}" * 16, 1.0, silent=True) for number in range(count)]
