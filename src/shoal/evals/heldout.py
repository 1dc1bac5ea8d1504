"""The evaluator measures the held-out accuracy of policy versions, greedy and sampled, during the run.

It is an ordinary pool member that receives versions through SHARDCAST, so it measures the weights that workers use.
Invariant: the first and the last version are evaluated on the same tasks with the same seeds. The first version is
skipped only if relays no longer have it when this node joins. The evaluator fetches it at once, but evaluates it only
after the second version is published. If all nodes run on one machine, an earlier evaluation would slow down the first
batch.
Left out: pass@k and named benchmark suites (`shoal eval`).
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from shoal import tasks
from shoal.config import Config
from shoal.config.sections import EVALUATED_AT_ONCE
from shoal.engine.protocol import Engine
from shoal.errors import ModelError
from shoal.evals.examiner import Examiner
from shoal.model.dtype import release_memory
from shoal.model.sampling import rollout_seed
from shoal.protocol.history import History, RunHistory
from shoal.protocol.messages import Evaluation, Ok
from shoal.protocol.node import Node
from shoal.shardcast import Client, FetchError
from shoal.shardcast.fetch import RefusedVersionError
from shoal.shardcast.fetch.client import fetch_published
from shoal.shardcast.store import KEEP
from shoal.tasks import TaskSet

MAX_INTERMEDIATE = 64  # maximum number of held-out tasks for any version between the first and the last
IDLE_S = 0.3

log = logging.getLogger(__name__)


class Evaluator:
    def __init__(
        self,
        node: Node,
        config: Config,
        new_engine: Callable[[], Engine],
        cache: Path,
        publisher: str,
        task_set: TaskSet | None = None,
    ) -> None:
        """`task_set` is the pool's task set. If it is None, load it from the config's sources."""
        self.node = node
        self.config = config
        self.new_engine = new_engine
        self.cache = cache
        self.access = node.access(publisher, config)
        self.tasks = task_set or tasks.load(config.tasks)
        self.examiner = Examiner(config, self.tasks.files)
        self.fetched: tuple[int, Path] | None = None  # the newest fetched version and its folder

    def close(self) -> None:
        """Stop the grader and environment processes."""
        self.examiner.close()

    def run(self, stop: threading.Event) -> str:
        """Evaluate versions as they become due, until the run ends or `stop` is set. Return the final state."""
        history = RunHistory()
        while history.add(self.node.get(f"/v1/history?after={history.cursor}", History)):
            pass
        done = {(evaluation.version, evaluation.final) for evaluation in history.evaluations}
        while not stop.is_set():
            answer = self.node.beat()
            if answer.state != "running":
                return answer.state
            due = self.due(answer.newest_version, done) if answer.relays else None
            if due is None:
                self.node.doing("a version to evaluate", waiting=True)
                stop.wait(IDLE_S)
                continue
            version, final = due
            try:
                folder = self.fetch(version)
            except FetchError as error:
                if isinstance(error, RefusedVersionError):
                    self.node.refuse(version, error)
                elif version > (answer.newest_version or 0) - KEEP:
                    raise  # the relays must be down, because they keep so new a version
                log.warning("version %d is not evaluated, because it cannot be fetched: %s", version, error)
                done.add(due)
                continue
            if answer.newest_version == 0:
                self.node.doing("the first batch", waiting=True)
                stop.wait(IDLE_S)
                continue
            try:
                evaluation = self.evaluate(version, folder, final)
            except ModelError as error:
                self.node.refuse(version, error)
                done.add(due)
                continue
            self.node.post("/v1/evaluations", evaluation, Ok)
            log.info(
                "version %d is evaluated: greedy %s, sampled %s, n %d",
                version,
                evaluation.greedy,
                evaluation.sampled,
                evaluation.n,
            )
            done.add(due)
            release_memory()  # free the evaluation's engine
        return "stopped"

    def due(self, newest: int | None, done: set[tuple[int, bool]]) -> tuple[int, bool] | None:
        """Return the version to evaluate now and whether it is the last; None if no version is due.

        The first and the last version are due. Between them, one is due after every `evaluator.every` versions.
        """
        every, last = self.config.evaluator.every, self.config.run.steps
        if newest is None:
            return None
        if (0, False) not in done:
            return 0, False
        if newest == last:
            return None if (last, True) in done else (last, True)
        is_due = every > 0 and newest - max(version for version, _ in done) >= every
        return (newest, False) if is_due else None

    def fetch(self, version: int) -> Path:
        """Fetch a version and return its folder, which is kept until the next fetch. Raise FetchError."""
        if self.fetched is None or self.fetched[0] != version:
            self.node.doing(f"fetching version {version}")
            relays = self.node.answer.relays if self.node.answer else []
            client = Client(relays, self.access, self.cache, keep=1)
            self.fetched = version, fetch_published(client, version)[0]
        return self.fetched[1]

    def evaluate(self, version: int, folder: Path, final: bool) -> Evaluation:
        """Return one version's held-out accuracy. Versions between the first and the last get fewer tasks."""
        self.examiner.load(self.new_engine(), folder)  # it is a new engine, so that its memory can be freed afterwards
        self.node.policy_version, self.node.refused = version, ""
        self.node.doing(f"evaluating version {version}")
        n = self.config.evaluator.n
        n = n if final or version == 0 else min(n, MAX_INTERMEDIATE)
        greedy, sampled = self._accuracy(0.0, n), self._accuracy(self.config.sampling.temperature, n)
        del self.examiner.engine
        return Evaluation(version=version, greedy=greedy, sampled=sampled, n=n, final=final)

    def _accuracy(self, temperature: float, n: int) -> float:
        correct = 0.0
        for start in range(0, n, EVALUATED_AT_ONCE):
            chunk = self.tasks.heldout[start : min(start + EVALUATED_AT_ONCE, n)]
            seeds = [[rollout_seed("shoal/heldout", 0, "", 0, start + i)] for i in range(len(chunk))]
            groups, grades = self.examiner.ask(chunk, start, seeds, temperature)
            self.node.tokens += sum(len(group[0].logprobs) for group in groups)
            correct += sum(grade.score for [grade] in grades)
        return correct / n
