"""A whole pool in virtual time: a validator, a learner, and workers that crash, lose uploads or stay silent.

Each event moves the clock, so nothing waits. Files, weights and signatures are left out.
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
    """A worker. `silent`: it requests tasks and uploads nothing."""

    key: str
    takes_s: float  # per task, plus `group_s` per group
    group_s: float = 0.0
    silent: bool = False
    crashes: float = 0.0  # probability that it dies during a task, and starts again with the newest weights
    loses: float = 0.0  # probability that it dies after a task, before the upload
    version: int = 0
    tasks: list[Assignment] = field(default_factory=list)
    working_on: list[Assignment] = field(default_factory=list)
    busy_until_s: float = 0.0
    deaths: int = 0
    took: list[float] = field(default_factory=list)  # seconds per finished task


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
        """`useful`: the share of useful groups. `groups`: the usual number of groups in a submission."""
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

    def run(self, max_s: float = 5_000.0) -> float:
        """Run the pool. Return the seconds until the last step's batch is full, at most `max_s`."""
        start_s = self.clock.now_s
        self.harness.pool.db.connection.sqlite.execute("PRAGMA synchronous = OFF")
        for member in self.members:
            self.after(self.random.random(), lambda member=member: self.request(member))  # type: ignore[misc]
        self.after(JUDGE_S, self.judge)
        while self.events and self.open_step() < STEPS and self.clock.now_s - start_s < max_s:
            self.clock.now_s, _, act = heapq.heappop(self.events)
            act()
        return self.clock.now_s - start_s

    def after(self, wait_s: float, act: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.clock.now_s + wait_s, self.count, act))

    def open_step(self) -> int:
        return self.harness.pool.db.open_step()

    # --- workers -----------------------------------------------------------------------------------------------------

    def request(self, member: Member) -> None:
        if not member.working_on:
            member.version = self.published
        elif member.version != self.published or len(member.working_on) == self.in_flight:
            return
        ids = [task.id for task in member.working_on]
        task = self.harness.beat(member.key, member.version, working_on=ids).assignment
        if (task is None and not ids) or member.silent:
            self.after(POLL_S, lambda: self.request(member))
        if task is None:
            return
        member.tasks.append(task)
        if member.silent:
            return
        member.working_on.append(task)
        took_s = (member.takes_s + member.group_s * task.groups) * self.random.uniform(0.8, 1.25)
        takes_s = took_s + max(member.busy_until_s - self.clock.now_s, 0.0)  # after the earlier tasks
        life = member.deaths
        if self.random.random() < member.crashes:
            self.after(takes_s * self.random.random() + 1.0, lambda: self.die(member, life))
        elif self.random.random() < member.loses:
            self.after(takes_s + 5.0, lambda: self.die(member, life))
        else:
            member.took.append(took_s)
            member.busy_until_s = self.clock.now_s + takes_s
            self.after(takes_s, lambda: self.upload(member, task, life))
        if self.in_flight > 1:
            self.request(member)

    def die(self, member: Member, life: int) -> None:
        """Lose all tasks in progress, and start again at once."""
        if life == member.deaths:
            member.deaths, member.working_on, member.busy_until_s = life + 1, [], 0.0
            self.request(member)

    def upload(self, member: Member, task: Assignment, life: int) -> None:
        if life != member.deaths:
            return
        member.working_on.remove(task)
        try:
            self.harness.pool.assignments.may_upload(member.key, task.id)
            self.harness.pool.assignments.uploaded(member.key, task.id, "9" * 64)
        except PoolError as refusal:
            assert refusal.status == 409
        self.request(member)

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
    """Return silent members, with keys other than those of `workers`."""
    return [Member(f"{0xF000 + number:04x}" * 16, 1.0, silent=True) for number in range(count)]
