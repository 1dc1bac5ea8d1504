"""Simulate a pool as queues, event by event: workers, their links, validators and the learner.

    worker      takes groups while the open batch needs more -> generates -> uploads while it generates the next groups
    validator   takes one submission at a time from the queue that all validators share
    learner     trains on one batch at a time -> publishes a version -> each worker's link fetches the newest version

The rules are the coordinator's (`coordinator/assignment`). It hands out only what the open batch needs, given the share of
useful groups. A version older than the async level allows is neither sampled from nor trained on. A worker changes version
between two submissions. Time is in seconds.
Invariant: the same setting and seed give the same result. The simulation leaves out lies, failures, the coordinator's own
time (docs/operate.md has measurements of it), and that a submission's size depends on the worker's speed.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rig:
    """One worker's machine and link."""

    group_s: float  # to generate a group
    groups: int  # in a submission
    start_s: float = 0.0  # fixed time of each submission: heartbeat, grading, proofs, file
    upload_s: float = 0.0
    fetch_s: float = 0.0  # to fetch a version over its link
    load_s: float = 0.0  # to load a version into its engine


@dataclass(frozen=True)
class Setting:
    steps: int
    async_level: int
    batch: int  # groups of a step
    rigs: Sequence[Rig]
    validators: int
    validate_s: float  # per group
    validate_start_s: float  # per submission
    train_s: float  # per batch
    publish_s: float = 0.0  # from the end of training until relays hand the version out
    useful: float = 1.0  # share of groups whose rewards differ
    spread: float = 0.0  # durations vary uniformly by this share in both directions


@dataclass(frozen=True)
class Result:
    """The outcome of a run. A field is a share of the time until the last batch is trained, unless its comment differs."""

    seconds: float
    step_s: float  # mean, without the first quarter of the steps
    generating: float  # mean over workers
    links: float  # mean over workers of the share in which their link fetches a version
    validators: float
    learner: float
    staleness: float  # versions, mean over trained groups
    wasted: float  # share of useful groups that grew too old


@dataclass
class _Worker:
    rig: Rig
    version: int = 0  # loaded
    fetched: int = 0
    fetching: bool = False
    parked: bool = False  # waits for its next version
    working_s: float = 0.0
    fetching_s: float = 0.0


@dataclass
class Pool:
    setting: Setting
    seed: int = 0
    now_s: float = 0.0
    newest: int = 0  # newest published version
    step: int = 0  # step whose batch is open
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    waiting: Counter[int] = field(default_factory=Counter)  # accepted useful groups by version
    under_way: int = 0  # groups being generated or waiting for a verdict
    uploads: deque[tuple[int, int]] = field(default_factory=deque)  # (groups, version)
    idle: deque[_Worker] = field(default_factory=deque)
    full: int = 0  # full batches that wait for the learner
    ended_s: list[float] = field(default_factory=list)  # when each step was trained
    free_validators: int = 0
    training: bool = False
    validating_s: float = 0.0
    training_s: float = 0.0
    ages: int = 0  # sum over all groups in batches
    too_old: int = 0
    useful: int = 0
    counted: int = 0  # events

    def run(self) -> Result:
        """Run until the last step is trained. Raise RuntimeError if the events run out before that."""
        self.draw = random.Random(self.seed)
        self.free_validators = self.setting.validators
        self.workers = [_Worker(rig) for rig in self.setting.rigs]
        self.idle.extend(self.workers)
        self._hand_out()
        while len(self.ended_s) < self.setting.steps:
            if not self.events:
                raise RuntimeError(f"no event is left at step {self.step} with version {self.newest}")
            self.now_s, _, happen = heapq.heappop(self.events)
            happen()
        return self._result()

    def _result(self) -> Result:
        first = len(self.ended_s) // 4
        steps = len(self.ended_s) - first
        begun_s = self.ended_s[first - 1] if first else 0.0
        return Result(
            seconds=self.now_s,
            step_s=(self.now_s - begun_s) / steps,
            generating=sum(one.working_s for one in self.workers) / (len(self.workers) * self.now_s),
            links=sum(one.fetching_s for one in self.workers) / (len(self.workers) * self.now_s),
            validators=self.validating_s / (self.setting.validators * self.now_s),
            learner=self.training_s / self.now_s,
            staleness=self.ages / (self.setting.batch * self.step),
            wasted=self.too_old / max(self.useful, 1),
        )

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        self.counted += 1
        heapq.heappush(self.events, (self.now_s + seconds, self.counted, happen))

    def _varied(self, seconds: float) -> float:
        spread = self.setting.spread
        return seconds * self.draw.uniform(1 - spread, 1 + spread) if spread else seconds

    # --- workers -----------------------------------------------------------------------------------------------------

    def _oldest(self) -> int:
        return self.step - self.setting.async_level

    def _missing(self) -> float:
        share = self.setting.useful
        return self.setting.batch / share - self.waiting.total() / share - self.under_way

    def _hand_out(self) -> None:
        """Give work to idle workers while the open batch needs it. Visit each idle worker once."""
        for _ in range(len(self.idle)):
            if self.step >= self.setting.steps or self.newest < self._oldest() or self._missing() <= 0:
                return
            worker = self.idle.popleft()
            if worker.fetched > worker.version:
                self._load(worker)
            elif worker.version < self._oldest():
                worker.parked = True
            else:
                self._generate(worker)

    def _load(self, worker: _Worker) -> None:
        def loaded(version: int = worker.fetched) -> None:
            worker.version = version
            self.idle.appendleft(worker)
            self._hand_out()

        self._after(worker.rig.load_s, loaded)

    def _generate(self, worker: _Worker) -> None:
        rig, version = worker.rig, worker.version
        keeps = version > self._oldest() and self.step + 1 < self.setting.steps
        groups = rig.groups if keeps else min(rig.groups, -int(-self._missing() // 1))
        self.under_way += groups
        lasts_s = self._varied(rig.start_s + groups * rig.group_s)

        def done() -> None:
            worker.working_s += lasts_s
            self._after(rig.upload_s, lambda: self._arrived(groups, version))
            self.idle.append(worker)
            self._hand_out()

        self._after(lasts_s, done)

    def _fetch(self, worker: _Worker) -> None:
        if worker.fetching or worker.fetched == self.newest:
            return
        worker.fetching = True
        lasts_s = self._varied(worker.rig.fetch_s)

        def fetched(version: int = self.newest) -> None:
            worker.fetching, worker.fetched = False, version
            worker.fetching_s += lasts_s
            if worker.parked:
                worker.parked = False
                self.idle.append(worker)
            self._fetch(worker)
            self._hand_out()

        self._after(lasts_s, fetched)

    # --- validators --------------------------------------------------------------------------------------------------

    def _arrived(self, groups: int, version: int) -> None:
        self.uploads.append((groups, version))
        self._validate()

    def _validate(self) -> None:
        while self.free_validators and self.uploads:
            groups, version = self.uploads.popleft()
            self.free_validators -= 1
            lasts_s = self._varied(self.setting.validate_start_s + groups * self.setting.validate_s)
            self._after(lasts_s, lambda g=groups, v=version, s=lasts_s: self._judged(g, v, s))  # type: ignore[misc]

    def _judged(self, groups: int, version: int, lasted_s: float) -> None:
        self.validating_s += lasted_s
        self.free_validators += 1
        self.under_way -= groups
        useful = sum(self.draw.random() < self.setting.useful for _ in range(groups))
        self.useful += useful
        if version < self._oldest():
            self.too_old += useful
        else:
            self.waiting[version] += useful
        self._close_batches()
        self._validate()
        self._hand_out()

    # --- the learner -------------------------------------------------------------------------------------------------

    def _close_batches(self) -> None:
        """Close batches while there are enough groups. Use the oldest groups first, but none that is too old."""
        while self.step < self.setting.steps and self.waiting.total() >= self.setting.batch:
            missing = self.setting.batch
            for version in sorted(self.waiting):
                taken = min(missing, self.waiting[version])
                missing -= taken
                self.waiting[version] -= taken
                self.ages += taken * (self.step - version)
            self.step += 1
            for version in [one for one in self.waiting if one < self._oldest()]:
                self.too_old += self.waiting.pop(version)
            self.full += 1
            self._train()

    def _train(self) -> None:
        if self.training or not self.full:
            return
        self.training = True
        self.full -= 1
        lasts_s = self._varied(self.setting.train_s)

        def trained() -> None:
            self.training = False
            self.training_s += lasts_s
            self.ended_s.append(self.now_s)
            version = len(self.ended_s)
            self._after(self.setting.publish_s, lambda: self._published(version))
            self._train()

        self._after(lasts_s, trained)

    def _published(self, version: int) -> None:
        self.newest = version
        for worker in self.workers:
            self._fetch(worker)
        self._hand_out()
